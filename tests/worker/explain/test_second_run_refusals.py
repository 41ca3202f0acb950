"""Where the second run of an alarm's forward does not happen, or shows nothing; and that it leaves no trace."""

from __future__ import annotations

import math
import random
import sys
import threading

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import SecondRun
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.record.bad_elements import pattern_of
from gpuwatch.worker.record.collectives import issued
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ..conftest import use_late_device
from ..models import ReturnsDTensor

pytestmark = pytest.mark.quick_here(20)


class Fault(nn.Module):
    """Makes inf each time; `act` runs before, with the number of the call."""

    def __init__(self, act=None):
        super().__init__()
        self.act, self.calls = act, []

    def forward(self, x):
        self.calls.append(1)
        if self.act is not None:
            self.act(len(self.calls))
        return x / 0


@pytest.fixture(autouse=True, params=["host", "device"])
def memory(request, monkeypatch):
    """Where the tensors are. The numbers of a device arrive later; with GPUWATCH_LATE_DEVICE all are on one."""
    if request.param == "device" and "late" not in request.fixturenames:
        use_late_device(monkeypatch, LateDevice(7))


def call(watched, model, x):
    """A forward that ends the job. The numbers of a device end it when the next one begins."""
    with pytest.raises(OverflowDetected):
        model(x)
        watched.collect()
        model(x)


def ends(watched, module, x=None):
    """The record of the second run, after a forward that ends the job."""
    torch.manual_seed(0)
    call(watched, nn.Sequential(nn.Linear(4, 4), module), torch.ones(2, 4) if x is None else x)
    found = watched.of(SecondRun)
    assert watched.faults == []
    return found[0] if found else None


def test_it_runs_once(watch):
    fault = Fault()
    ran = ends(watch(on_overflow="abort"), fault)
    assert ran.operation.op == "aten.div.Tensor"
    assert ran.operation.element == "everything"
    assert (len(fault.calls), ran.unknown, ran.eagerly) == (2, "", False)


@pytest.mark.parametrize("settings", [{"explain": "off", "on_overflow": "abort"}, {"on_overflow": "continue"}])
def test_it_does_not_run(watch, settings):
    watched, fault = watch(**settings), Fault()
    try:
        nn.Sequential(fault)(torch.ones(2, 4))
    except OverflowDetected:
        assert settings["on_overflow"] == "abort"
    assert len(fault.calls) == 1
    assert watched.of(SecondRun) == []
    assert watched.verdict().operation is None


def test_a_collective_in_the_call(watch, alone_in_a_group):
    fault = Fault(lambda call: torch.distributed.all_reduce(torch.ones(1)))
    ran = ends(watch(on_overflow="abort"), fault)
    assert ran.unknown == "collectives ran within the call; with --sync a part of it without collectives may run again"
    assert len(fault.calls) == 1


def test_with_sync_the_module_itself_runs_again_where_collectives_ran_around_it(watch, alone_in_a_group):
    class Reduced(nn.Module):
        def forward(self, x):
            torch.distributed.all_reduce(torch.ones(1))
            return x

    ran = ends(watch(on_overflow="abort", sync=True), nn.Sequential(Reduced(), Fault()))
    assert ran.operation.module == "1.1"


def test_collectives_of_ddp_around_its_module_are_no_obstacle(watch, alone_in_a_group):
    watched = watch(on_overflow="abort")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), Fault()))
    before = issued()
    call(watched, model, torch.ones(2, 4))
    assert issued() > before, "it has sent its buffers"
    (ran,) = watched.of(SecondRun)
    assert ran.operation.module == "1"


def test_random_numbers_of_the_root_are_those_of_the_first_run(watch):
    torch.manual_seed(1)
    watched, model = watch(on_overflow="abort"), Dropped()
    call(watched, model, torch.ones(4, 8))
    first = model.out.detach()
    (ran,) = watched.of(SecondRun)
    assert ran.operation.element == pattern_of(first)


def test_a_collective_that_the_first_run_had_not(watch, alone_in_a_group):
    reduced = torch.ones(1)
    fault = Fault(lambda call: call > 1 and torch.distributed.all_reduce(reduced.add_(1)))
    ran = ends(watch(on_overflow="abort"), fault)
    assert ran.unknown == "a second run of the forward was stopped: it would have issued a collective"


def _finite_again(module):
    """inf in the first call alone."""
    return lambda call: setattr(module, "act", None)


class Once(nn.Module):
    """As dropout may: finite the second time."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append(1)
        return x / (len(self.calls) - 1)


def test_a_second_run_that_stays_finite(watch):
    watched = watch(on_overflow="abort")
    ran = ends(watched, Once())
    assert ran.unknown == "a second run of the forward did not make it again"
    verdict = watched.verdict()
    assert verdict.operation is None
    assert f"which operation made it is not known: {ran.unknown}" in verdict.evidence


def test_a_deadline_ends_the_wait(watch):
    watched, go = watch(on_overflow="abort"), threading.Event()
    watched.hooks.second_runs.rerun.limit_s = 0.1
    ran = ends(watched, Fault(lambda call: call > 1 and go.wait()))
    go.set()
    assert ran.unknown == "a second run of the forward took longer than 0.1 s"
    for thread in threading.enumerate():
        if thread.name == "gpuwatch second run":
            thread.join()


def _out_of_memory(call):
    if call > 1:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (_out_of_memory, "ran out of memory"),
        (lambda call: call > 1 and torch.empty(1 << 60), "ran out of memory"),
        (lambda call: call > 1 and [].pop(), "raised IndexError"),
        (lambda call: call > 1 and sys.exit(3), "raised SystemExit"),
    ],
)
def test_a_second_run_that_fails(watch, act, what):
    ran = ends(watch(on_overflow="abort"), Fault(act))
    assert ran.unknown == f"a second run of the forward {what}"


class Accumulates(nn.Module):
    """What it makes depends on a buffer that it changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.full((4,), 2e38))

    def forward(self, x):
        self.total.mul_(1.5)
        return x + self.total * 2


class InPlace(nn.Module):
    """Changes its input, which is finite afterwards."""

    def forward(self, x):
        return x.mul_(1e30) * 1e30


class InPlaceOnly(nn.Module):
    def forward(self, x):
        return x.mul_(1e30).mul_(1e30)


def test_a_buffer_that_its_result_depends_on(watch):
    module = Accumulates()
    ran = ends(watch(on_overflow="abort"), module)
    assert ran.unknown == "its call changes an input or a buffer in place"
    assert torch.equal(module.total, torch.full((4,), 2e38).mul_(1.5)), "as after the first run"


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (InPlace, "its call changes an input or a buffer in place"),
        (InPlaceOnly, "the arguments of its call were not finite when that returned"),
    ],
)
def test_an_input_that_was_changed_in_place(watch, module, why):
    watched = watch(on_overflow="abort")
    call(watched, nn.Sequential(module(), nn.Linear(4, 4)), torch.ones(2, 4))
    (ran,) = watched.of(SecondRun)
    assert ran.unknown == why


def test_a_call_around_it_has_the_input_that_was_changed(watch):
    ran = ends(watch(on_overflow="abort"), InPlaceOnly())
    assert (ran.operation.op, ran.operation.module) == ("aten.mul_.Tensor", "1")
    assert ran.operation.inputs[0].abs_max > 1e28


class Normed(nn.Module):
    """With a running average and a cache, which the run leaves as they were."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(2, 4))
        self.seen = None

    def forward(self, x):
        self.seen = x
        self.cache.copy_(x)
        return (self.norm(x) + 1e30) * 1e30


def test_buffers_and_attributes_are_put_back(watch):
    module, alone = Normed(), Normed()
    watched = watch(on_overflow="abort")
    ran = ends(watched, module)
    watched.hooks.detach()
    assert ran.operation.op == "aten.mul.Tensor"
    x = module.seen
    alone(x)
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, dict(alone.named_buffers())[name]), name
    assert x.grad_fn is not None, "that of the first run"


def test_random_numbers_go_on_as_they_would(watch):
    def act(call):
        random.random()
        torch.rand(2)

    states = []
    for explain in ("off", "auto"):
        random.seed(0)
        watched = watch(on_overflow="abort", explain=explain)
        ends(watched, Fault(act))
        watched.hooks.detach()
        states.append((random.random(), torch.rand(1).item()))
    assert states[0] == states[1]


def test_a_script_that_prints_prints_twice(watch, capsys):
    ends(watch(on_overflow="abort"), Fault(lambda call: print("step")))
    assert capsys.readouterr().out == "step\nstep\n"


def test_the_local_part_of_a_dtensor_is_looked_at(watch, alone_in_a_group):
    module = ReturnsDTensor(4, 4)
    nn.init.constant_(module.weight, 3e38)
    ran = ends(watch(on_overflow="abort"), module, torch.full((2, 4), 1e3))
    assert (ran.operation.op, ran.operation.module) == ("aten.addmm.default", "1")


def test_operations_on_dtensors_are_not_run_again(watch, alone_in_a_group):
    module = parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (1,)), ColwiseParallel(use_local_output=False))
    nn.init.constant_(module.weight, 3e38)
    ran = ends(watch(on_overflow="abort", sync=True), module, torch.full((2, 4), 1e3))
    assert ran.unknown.endswith("it works on tensors of a class of its own (DTensor)")


class CountingMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_script(watch):
    with CountingMode():
        ran = ends(watch(on_overflow="abort"), Fault())
    assert ran.unknown == "the script has a mode of torch on"


def test_a_default_device_is_no_obstacle(watch):
    with torch.device("cpu"):
        assert ends(watch(on_overflow="abort"), Fault()).operation is not None


class Recomputed(nn.Module):
    """inf when it runs again for the backward."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append(1)
        return x * x * (1.0 if len(self.calls) == 1 else math.inf)


def test_a_forward_that_ran_again_for_the_backward(watch):
    watched, inner = watch(on_overflow="abort"), Recomputed()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.inner = nn.Linear(4, 4), inner

        def forward(self, x):
            return checkpoint(self.inner, self.enter(x), use_reentrant=False)

    model = Net()
    with pytest.raises(OverflowDetected):
        with set_checkpoint_early_stop(False):
            model(torch.ones(2, 4)).sum().backward()
        watched.collect()
        model(torch.ones(2, 4))
    (ran,) = watched.of(SecondRun)
    assert ran.unknown == "it was made when a checkpointed forward ran again within the backward"
    assert len(inner.calls) == 2


# -- numbers of a device, which arrive when the call is over ----------------------------------------------------------


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.out = None

    def forward(self, x, scale=None):
        self.out = nn.functional.dropout(x * self.weight, 0.5) * 3e38 * 10
        return self.out


def ends_late(watched, x, between=lambda x: None):
    """The record of the second run of a step whose alarm is raised before the optimizer."""
    torch.manual_seed(0)
    model = Dropped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(x, scale={"of": [torch.ones(1)]}).detach()
    model.out.sum().backward()
    watched.collect()
    x = between(x)
    with pytest.raises(OverflowDetected):
        optimizer.step()
    assert watched.faults == []
    (ran,) = watched.of(SecondRun)
    return ran, out


def test_the_root_runs_again_with_the_random_numbers_that_it_had(watch, late):
    watched = watch(on_overflow="abort")
    ran, out = ends_late(watched, torch.ones(2, 8))
    assert ran.operation.op == "aten.mul.Tensor", ran
    assert "dropout" in ran.operation.code
    assert ran.operation.element == pattern_of(out)
    assert watched.verdict().operation == ran.operation


@pytest.mark.parametrize(
    ("rows", "between", "why"),
    [
        (2, lambda x: x.add_(1), "what the model was handed was changed in place since"),
        (1 << 18, lambda x: x, None),
    ],
)
def test_what_the_root_was_handed(watch, late, rows, between, why):
    """A large tensor is not kept alive: here the caller does."""
    x = torch.ones(rows, 8)
    ran, _ = ends_late(watch(on_overflow="abort"), x, between)
    assert ran.unknown == (why or "")
    assert (ran.operation is None) == (why is not None)


def test_large_inputs_that_are_gone(watch, late):
    watched = watch(on_overflow="abort")
    model = Dropped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1 << 18, 8)).sum().backward()
    watched.collect()
    with pytest.raises(OverflowDetected):
        optimizer.step()
    (ran,) = watched.of(SecondRun)
    assert ran.unknown == "the arguments of the call that made it were gone when its numbers arrived"


def test_weights_that_a_step_has_changed(watch, late):
    watched = watch(on_overflow="abort")
    model = Dropped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late.held.add(0)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    late.held.clear()
    watched.collect()
    with pytest.raises(OverflowDetected):
        optimizer.step()
    (ran,) = watched.of(SecondRun)
    assert ran.unknown == "an optimizer step has changed the weights since"


def test_an_input_that_was_bad_is_nobodys_operation(watch):
    watched = watch(on_overflow="abort")
    ends(watched, nn.Linear(4, 4), torch.full((2, 4), math.inf))
    verdict = watched.verdict()
    assert verdict.phase == "input"
    assert verdict.operation is None
    assert not [line for line in verdict.evidence if "operation" in line]


def test_a_line_of_torch_is_told_by_the_line_that_called_it(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            nn.init.constant_(self.fc.weight, 1e30)

        def forward(self, x):
            return self.fc(x * 1e30)  # of the call

    ran = ends(watch(on_overflow="abort"), Net())
    assert ran.operation.code == "return self.fc(x * 1e30)  # of the call"
    assert ran.operation.module == "1.fc"
    assert [each.shape for each in ran.operation.inputs] == [[4], [2, 4], [4, 4]]


def test_sync_ends_in_the_module_itself(watch):
    watched = watch(on_overflow="abort", sync=True)
    assert ends(watched, Fault()).operation is not None


class Unseen(nn.Module):
    """Writes by a way that torch does not dispatch, as a kernel of Triton's does."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x):
        out = self.made(x.detach())
        out.numpy()[0, 0] = math.inf
        return x + out


@pytest.mark.parametrize("made", [torch.empty_like, torch.zeros_like])
def test_what_a_kernel_wrote_that_torch_does_not_dispatch(watch, made):
    """A sum of finite numbers is not blamed for it, and neither is torch.empty."""
    ran = ends(watch(on_overflow="abort"), Unseen(made))
    assert ran.operation is None
    assert ran.unknown.startswith("no operation that torch dispatches made it")


class Halves(nn.Module):
    """Writes a column twice: first inf, then what is finite. Another column stays bad."""

    def forward(self, x):
        out = torch.zeros_like(x)
        out[:, 0] = x[:, 0] / 0
        out[:, 0] = x[:, 0]
        out[:, 2] = x[:, 2].abs().log1p().neg().log()
        return out


def test_what_was_overwritten_is_not_blamed(watch):
    ran = ends(watch(on_overflow="abort"), Halves())
    assert ran.operation.op == "aten.log.default"


def test_a_script_that_goes_on_has_one_run(watch):
    watched, fault = watch(on_overflow="abort"), Fault()
    for _ in range(3):
        call(watched, nn.Sequential(fault), torch.ones(2, 4))
    assert len(fault.calls) == 4
    assert len(watched.of(SecondRun)) == 1
