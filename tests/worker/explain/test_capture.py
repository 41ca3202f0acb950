"""What --capture writes at an alarm, and what it leaves alone; tests/e2e/test_replay.py runs such files again."""

from __future__ import annotations

import resource
import stat
import threading

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import ForwardCaptured, SecondRun
from gpuwatch.worker.explain import reproduce
from torch import nn


class Fault(nn.Module):
    """Makes inf each time; `act` runs before, with the input."""

    def __init__(self, act=None):
        super().__init__()
        self.act = act

    def forward(self, x):
        if self.act is not None:
            self.act(x)
        return x / 0


@pytest.fixture
def captures(watch, tmp_path):
    """Watches a rank that captures, runs a model that overflows, and returns (what is told of the file, its folder)."""

    def run(model, *args, meanwhile=lambda: None, limit_s=None, **settings):
        watched = watch(on_overflow="abort", capture=str(tmp_path / "run"), **settings)
        watched.hooks.second_runs.rerun.limit_s = limit_s or watched.hooks.second_runs.rerun.limit_s
        with pytest.raises(OverflowDetected):
            model(*(args or (torch.ones(2, 4),)))
            model(*(args or (torch.ones(2, 4),)))  # a late device's numbers have arrived by then
        found = watched.of(ForwardCaptured)
        assert watched.faults == []
        assert len(watched.of(SecondRun)) == (settings.get("explain") != "off")
        watched.hooks.detach()
        meanwhile()
        return found[0].file if found else None, tmp_path / "run"

    return run


def refused(captures, *args, **settings):
    """Why there is no file."""
    file, folder = captures(*args, **settings)
    assert (file.path, file.bytes) == ("", 0)
    assert not folder.is_dir() or list(folder.iterdir()) == []
    return file.refused


@pytest.mark.parametrize("explain", ["auto", "off"])
def test_the_module_its_inputs_and_the_state_of_torch_are_written(captures, explain):
    model = nn.Sequential(nn.Linear(4, 4), Fault())
    torch.manual_seed(5)
    file, folder = captures(model, torch.arange(8.0).view(2, 4), explain=explain)
    path = folder / "overflow.pt"
    assert (file.path, file.bytes, file.refused, file.notes) == (str(path), path.stat().st_size, "", [])
    assert (file.module, file.needs_trust) == ("(root) (torch.nn.modules.container.Sequential)", True)
    assert [stat.S_IMODE(each.stat().st_mode) for each in sorted(folder.iterdir())] == [0o600, 0o600]
    capture = reproduce.load(path)
    torch.testing.assert_close(capture["state_dict"], {k: v.detach() for k, v in model.state_dict().items()})
    assert capture["args"][0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert capture["tensors"] == ["input[0] torch.float32 [2, 4] cpu"]
    assert capture["torch"] == torch.__version__
    assert torch.equal(capture["rng"]["cpu"], torch.Generator().manual_seed(5).get_state())
    call = reproduce.rebuild(capture)
    assert call.module(*call.args).isinf().sum() == 8


def test_a_view_is_written_without_the_rest_of_its_memory(captures):
    whole = torch.ones(1000, 1000)
    file, folder = captures(Fault(), whole[:2, :4])
    assert file.bytes < 100_000
    assert reproduce.load(folder / "overflow.pt")["args"][0].shape == (2, 4)


def test_a_second_capture_keeps_the_first(captures):
    for name in "overflow.pt", "overflow-rank0.pt", "overflow-rank0-2.pt":
        file, folder = captures(Fault())
        assert file.path == str(folder / name)
    assert sorted(path.name for path in folder.glob("*.py")) == [
        "reproduce-rank0-2.py",
        "reproduce-rank0.py",
        "reproduce.py",
    ]


def test_one_that_is_too_large_is_refused(captures):
    model = nn.Sequential(nn.Linear(4, 1000), Fault())
    why = refused(captures, model, capture_max=10 << 10)
    assert why == "it takes 19.6 KiB, and --capture-max is 10 KiB; --sync writes a smaller part"


def test_an_attribute_that_is_too_large_is_refused(captures):
    model = Fault()
    model.samples = {frozenset(): torch.ones(100_000)}
    assert refused(captures, model, capture_max=10_000) == "it takes more than --capture-max"


def test_the_deadline_ends_the_wait_and_the_thread_names_no_file_afterwards(captures):
    written = threading.Event()

    class Slow:
        def __reduce__(self):
            assert written.wait(60)
            return dict, ()

    model = Fault()
    model.options = Slow()

    def goes_on():
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "gpuwatch capture"]
        written.set()
        thread.join()

    why = refused(captures, model, meanwhile=goes_on, explain="off", limit_s=0.1)
    assert why == "writing it took longer than 0.08 s"


def test_a_full_disk_is_told(captures):
    model = nn.Sequential(nn.Linear(4, 10_000), Fault())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = 100_000, before[1]
    model.register_forward_pre_hook(lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    try:
        why = refused(captures, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert why.endswith("/run could not be written: File too large")


def test_a_folder_that_cannot_be_made_is_told(captures, tmp_path):
    (tmp_path / "run").write_text("a file")
    file, folder = captures(Fault())
    assert file.refused == f"{folder} could not be written: File exists"


def test_what_cannot_be_pickled_or_found_again_is_told(captures):
    class Local(Fault):
        pass

    model = Fault(lambda x: None)
    assert "its attribute act cannot be pickled" in refused(captures, model)
    why = "its class {} is defined inside of a function, or made while it runs"
    assert refused(captures, nn.Sequential(Local())) == why.format(Local.__qualname__)


def test_a_hook_that_cannot_be_pickled_is_left_out_and_told(captures):
    model = nn.Sequential(nn.Linear(4, 4), Fault())
    model[0].register_forward_hook(lambda *_: None)
    file, folder = captures(model)
    assert file.notes == ["the hooks of 0 are left out: they cannot be pickled"]
    assert reproduce.load(folder / "overflow.pt")["notes"] == file.notes


def test_weights_that_are_shards_are_not_written(captures, alone_in_a_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = Fault()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,))))
    assert refused(captures, model) == "it holds tensors of a class of its own (DTensor)"


def test_what_fsdp_holds_is_not_written(captures, alone_in_a_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), Fault())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    file, _ = captures(model, explain="off")
    assert file.refused in (
        "collectives ran within the call; with --sync a part of it without collectives may run again",
        "its weights are sharded (FSDPSequential)",
    )


def test_a_call_that_changes_its_inputs_is_not_written(captures):
    assert refused(captures, Fault(torch.Tensor.square_)) == "its call changes an input or a buffer in place"


def test_without_a_second_run_changed_inputs_are_not_known_and_that_is_told(captures):
    file, folder = captures(Fault(torch.Tensor.square_), explain="off")
    assert (file.refused, len(file.notes)) == ("", 1)
    assert "in place" in reproduce.load(folder / "overflow.pt")["notes"][0]


def test_a_call_with_collectives_is_not_written(captures, alone_in_a_group):
    reduced = torch.ones(1)
    model = Fault(lambda x: torch.distributed.all_reduce(reduced))
    why = "collectives ran within the call; with --sync a part of it without collectives may run again"
    assert refused(captures, model, explain="off") == why


def test_a_run_that_goes_on_writes_nothing(watch, tmp_path):
    watched = watch(on_overflow="continue", capture=str(tmp_path / "run"))
    Fault()(torch.ones(2, 4))
    assert watched.of(ForwardCaptured) == []
    assert not (tmp_path / "run").exists()


def test_a_gradients_alarm_writes_nothing(watch, tmp_path):
    watched, weight = watch(on_overflow="abort", capture=str(tmp_path / "run")), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(weight.parameters(), 0.1)
    (weight(torch.ones(2, 4)).sum() * float("inf")).backward()
    with pytest.raises(OverflowDetected):
        optimizer.step()
    assert watched.of(ForwardCaptured) == []
    assert not (tmp_path / "run").exists()


def test_the_verdict_has_the_file_and_the_command(watch, tmp_path):
    watched = watch(on_overflow="abort", capture=str(tmp_path / "run"))
    with pytest.raises(OverflowDetected):
        Fault()(torch.ones(2, 4))
        Fault()(torch.ones(2, 4))
    verdict = watched.verdict()
    assert verdict.capture.path == str(tmp_path / "run" / "overflow.pt")
    assert verdict.next[0].startswith(verdict.cause.next[0]), "a cause that is known comes before what would find it"
    assert verdict.next[0].endswith(f"gpuwatch replay {tmp_path / 'run'} --trust")


def test_the_call_of_a_root_whose_numbers_came_late_has_the_state_that_it_was_called_in(watch, late, tmp_path):
    watched = watch(on_overflow="abort", capture=str(tmp_path / "run"))
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), Fault()), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    watched.collect()
    with pytest.raises(OverflowDetected):
        optimizer.step()
    capture = reproduce.load(tmp_path / "run" / "overflow.pt")
    assert capture["autocast"] == {"cpu": torch.bfloat16}
    assert torch.equal(capture["args"][0], x)
    assert torch.equal(capture["rng"]["cpu"], torch.Generator().manual_seed(5).get_state())
