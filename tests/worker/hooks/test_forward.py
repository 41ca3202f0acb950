"""The forward: frames, roots, batches, exceptions, alarms. The other phases have files of their own."""

from __future__ import annotations

import copy
import gc
import math
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarms import IgnoredAlarm
from gpuwatch.core.recorder.layout import HeadField
from gpuwatch.worker.compile.region_parts import compiled_views
from gpuwatch.worker.hooks.global_hooks import RunningCalls
from needs import needs
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from ..models import Block, Multiplies
from ..models import block_net as net

pytestmark = pytest.mark.quick_here(32)

X = torch.ones(3, 4)


def titles(page) -> list[tuple[str, str, str | None, int]]:
    return [(frame.module, frame.cls, frame.parent, frame.depth) for frame in page.frames]


# -- frames -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
def test_a_wrapper_around_a_block_does_not_put_it_into_the_call_after_it(watch, monkeypatch, native):
    """As FSDP and activation checkpointing wrap blocks: the head is called after them, not around them."""
    if not native:
        monkeypatch.setattr("gpuwatch.worker.hooks.native_writer.NativeFrameWriter", None)
    watched = watch()
    model = net()
    model[0] = checkpoint_wrapper(model[0])
    model(X)
    assert titles(watched.last) == [
        ("0.fc1", "Linear", "0", 2),
        ("0.fc2", "Linear", "0", 2),
        ("0", "Block", "", 1),
        ("1", "Linear", "", 1),
        ("", "Sequential", None, 0),
    ]


def test_frames_are_in_the_order_in_which_calls_return_with_the_users_names(watch):
    watched = watch()
    model = net()
    model(X)
    page = watched.last
    assert (page.root, page.batch, page.step, page.complete, page.lost_frames) == ("Sequential", 0, 0, False, 0)
    assert titles(page) == [
        ("0.fc1", "Linear", "0", 2),
        ("0.fc2", "Linear", "0", 2),
        ("0", "Block", "", 1),
        ("1", "Linear", "", 1),
        ("", "Sequential", None, 0),
    ]
    assert [row.role for row in page.frames[0].rows] == ["weight", "bias", "input[0]", "output"]
    assert [row.shape for row in page.frames[0].rows] == [[4, 4], [4], [3, 4], [3, 4]]
    assert watched.faults == watched.anomalies == []
    model(X)
    assert [page.complete for page in watched.pages] == [True, False], "its backward may still come"


def test_the_numbers_are_torchs_own(watch):
    watched = watch()
    model = net()
    out = model(X)
    for frame in watched.last.frames:
        weights = dict(model.get_submodule(frame.module).named_parameters(recurse=False))
        for row in frame.weights:
            assert row.abs_min == weights[row.role].abs().min().item()
            assert row.abs_max == weights[row.role].abs().max().item()
    assert watched.last.frames[-1].outputs[0].abs_max == out.abs().max().item()


@needs("torch.nn.modules.module._global_forward_hooks_with_kwargs")
def test_a_model_with_keyword_arguments_alone_that_returns_a_dict(watch):
    class Model(nn.Module):
        def forward(self, *, ids, mask=None, flag=True):
            return {"logits": ids * 2, "cache": (ids, None), "count": 3}

    watched = watch()
    Model()(ids=X, mask=None, flag=False)
    (frame,) = watched.last.frames
    assert [(row.role, row.kind) for row in frame.rows] == [
        ("kwargs.ids", "measured"),
        ("kwargs.mask", "none"),
        ("kwargs.flag", "not_a_tensor"),
        ("output.logits", "measured"),
        ("output.cache[0]", "measured"),
        ("output.cache[1]", "none"),
        ("output.count", "not_a_tensor"),
    ]
    assert frame.rows[0].value == frame.rows[4].value, "the same tensor has one value"


def test_a_module_called_twice_has_two_frames(watch):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.fc(x))

    watched = watch()
    Twice()(X)
    assert [frame.module for frame in watched.last.frames] == ["fc", "fc", ""]


def test_wrappers_have_no_frames_and_the_root_is_what_the_user_wrote(watch):
    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args):
            return self.module(*args)

    watched = watch()
    DistributedDataParallel(net())(X)
    assert watched.last.root == "Sequential"
    assert [(f.module, f.parent) for f in watched.last.frames][-2:] == [("1", ""), ("", None)]


def test_a_module_made_on_the_fly_has_a_name_of_its_own(watch):
    class Fly(nn.Module):
        def forward(self, x):
            return nn.Softmax(dim=-1)(x)

    watched = watch()
    model = nn.Sequential(Fly())
    for _ in range(3):
        model(X)
    assert [frame.module for frame in watched.last.frames] == ["0.<Softmax>", "0", ""]
    assert watched.faults == []


def test_modules_made_on_the_fly_are_not_looked_for_in_the_whole_model_each_time(watch):
    class Counting(dict):
        walks = 0

        def items(self):
            Counting.walks += 1
            return super().items()

    class Fly(nn.Module):
        def forward(self, x):
            return nn.Softmax(dim=-1)(x)

    watched = watch()
    model = nn.Sequential(Fly(), nn.Identity())
    for _ in range(5):  # in batches 0, 1, 2 and 4 its buffers are looked for
        model(X)
    model[1]._modules = Counting()
    for _ in range(3):
        model(X)
    assert Counting.walks == 0
    assert [frame.module for frame in watched.last.frames] == ["0.<Softmax>", "0", "1", ""]


def test_one_that_is_kept_after_others_were_thrown_away_gets_its_true_name(watch):
    class Fly(nn.Module):
        def forward(self, x):
            return (self.parts[0] if hasattr(self, "parts") else nn.Softmax(dim=-1))(x)

    watched = watch()
    model = nn.Sequential(Fly())
    for _ in range(3):
        model(X)
    assert [frame.module for frame in watched.last.frames] == ["0.<Softmax>", "0", ""]
    model[0].parts = nn.ModuleList([nn.Softmax(dim=-1)])
    for _ in range(3):
        model(X)
    assert [frame.module for frame in watched.last.frames] == ["0.parts.0", "0", ""]


def test_one_that_is_kept_outside_of_the_model_keeps_its_name(watch):
    made = []

    class Fly(nn.Module):
        def forward(self, x):
            if len(made) < 2:
                made.append(nn.Softmax(dim=-1))
            return made[-1](x)

    watched = watch()
    model = nn.Sequential(Fly())
    for _ in range(5):
        model(X)
        assert [frame.module for frame in watched.last.frames] == ["0.<Softmax>", "0", ""]


def test_a_module_added_later_gets_its_true_name(watch):
    watched = watch()
    model = net()
    model(X)
    model.add_module("late", nn.Linear(2, 2))
    model(X)
    assert "late" in [frame.module for frame in watched.last.frames]


def names_recorded(watched, call) -> tuple[int, int]:
    """Bytes of the log that 10 more calls take, early and late."""
    grown = []
    for count in (10, 10, 200, 10):
        before = watched.reader[HeadField.LOG_END]
        for _ in range(count):
            call()
        grown.append(watched.reader[HeadField.LOG_END] - before)
    return grown[1], grown[3]


def test_a_module_made_anew_in_every_forward_does_not_fill_the_log(watch):
    class Fly(nn.Module):
        def forward(self, x):
            return nn.Softmax(dim=-1)(x)

    watched = watch()
    model = Fly()
    assert names_recorded(watched, lambda: model(X)) == (0, 0)


def test_a_loss_made_anew_in_every_step_does_not_fill_the_log(watch):
    """`loss = nn.MSELoss()(out, y)` in the loop is a root of its own each time."""
    watched = watch()
    model = net()
    assert names_recorded(watched, lambda: nn.MSELoss()(model(X), torch.zeros(3, 2))) == (0, 0)


# -- each value is read once --------------------------------------------------------------------------------------


def test_each_tensor_is_read_once_in_a_batch(watch, measured):
    watched = watch()
    model = net()
    model(X)
    assert len({id(tensor) for tensor in measured}) == len(measured)
    by_role = {(f.module, row.role): row.value for f in watched.last.frames for row in f.rows}
    assert by_role["0.fc1", "input[0]"] == by_role["0", "input[0]"] == by_role["", "input[0]"]
    assert by_role["0", "output"] == by_role["1", "input[0]"]
    assert by_role["1", "output"] == by_role["", "output"]


def test_weights_are_read_once_per_optimizer_step_and_are_in_every_page(watch, measured):
    watched = watch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = {id(p) for p in model.parameters()}

    def reads() -> int:
        count = sum(id(tensor) in parameters for tensor in measured)
        measured.clear()
        return count

    for expected in (6, 0, 0):
        model(X).sum().backward()
        assert reads() == expected
    optimizer.step()
    assert reads() == 6
    model(X)
    assert reads() == 0, "those of the step are still true"
    forwards = [frame for page in watched.pages for frame in page.frames if frame.phase == "forward"]
    assert [len(frame.weights) for frame in forwards] == [2, 2, 0, 2, 0] * 4
    assert all(row.kind == "measured" for frame in forwards for row in frame.weights)
    assert [page.step for page in watched.pages] == [0, 0, 0, 1]


def test_a_weight_changed_in_place_is_read_again(watch):
    watched = watch()
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2))
    with torch.no_grad():
        model.weight.fill_(42)
    model(torch.ones(1, 2))
    assert watched.last.frames[0].weights[0].abs_max == 42


def test_a_tensor_changed_in_place_between_two_calls_is_read_again(watch):
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Identity(), nn.Identity()

        def forward(self, x):
            return self.b(self.a(x).mul_(100))

    watched = watch()
    InPlace()(X.clone())
    a, b, _ = watched.last.frames
    assert (a.outputs[0].abs_max, b.inputs[0].abs_max) == (1, 100)


# -- roots and batches --------------------------------------------------------------------------------------------


def test_two_roots_are_counted_by_themselves(watch):
    watched = watch()
    left, right = nn.Linear(4, 4), nn.Linear(4, 4)
    for model in (left, right, left, left):
        model(X)
    assert [(page.root, page.batch) for page in watched.pages] == [
        ("Linear", 0),
        ("Linear#2", 0),
        ("Linear", 1),
        ("Linear", 2),
    ]


def test_a_part_called_by_itself_is_no_batch_of_its_own(watch):
    watched = watch()
    model = net()
    model(X)
    model[0](X)
    model(X)
    assert [(page.root, page.batch, page.frames[-1].module) for page in watched.pages] == [
        ("Sequential", 0, ""),
        ("Sequential", 0, "0"),
        ("Sequential", 1, ""),
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoints_recomputation_is_no_second_batch(watch, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(checkpoint(self.block, x, use_reentrant=reentrant))

    watched = watch()
    model = Checkpointed()
    for _ in range(2):
        model(X.clone().requires_grad_()).sum().backward()
    assert [page.batch for page in watched.pages] == [0, 1]
    again = [frame.module for frame in watched.frames("recompute")]
    assert again == ["block.fc1", "block.fc2", "block"]
    assert watched.faults == watched.anomalies == []


def test_a_root_that_calls_itself_is_one_batch(watch):
    class Tree(nn.Module):
        def forward(self, depth):
            return X if depth == 0 else self(depth - 1) + 1

    watched = watch()
    model = Tree()
    for _ in range(2):
        model(3)
    assert [(page.batch, len(page.frames)) for page in watched.pages] == [(0, 4), (1, 4)]


def test_the_header_says_where_the_rank_is(watch):
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            watched.events  # noqa: B018  # reads the definitions
            seen.append(watched.reader.state())
            return x

    watched = watch()
    model = nn.Sequential(nn.Identity(), Look())
    model(X)
    model(X)
    assert [(s.phase, s.batch, s.module, s.cls) for s in seen] == [("forward", n, "1", "Look") for n in range(2)]
    assert watched.reader.state().phase == "script"
    assert watched.reader.state().module is None


# -- exceptions ---------------------------------------------------------------------------------------------------


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.error: BaseException | None = None

    def forward(self, x):
        self.inner(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize(
    "error", [ValueError("boom"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__
)
def test_an_exception_in_a_forward_passes_and_the_next_batch_is_fine(watch, error):
    watched = watch()
    model = nn.Sequential(nn.Identity(), Sometimes(), nn.Identity())
    model(X)
    model[1].error = error
    with pytest.raises(type(error)):
        model(X)
    model[1].error = None
    model(X)
    assert titles(watched.last) == titles(watched.pages[0])
    assert watched.faults == []


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_after_an_exception_another_root_is_a_root(watch, error):
    watched = watch()
    model, other = nn.Sequential(Sometimes()), nn.Linear(4, 4)
    model[0].error = error
    with pytest.raises(type(error)):
        model(X)
    other(X)
    assert (watched.last.root, titles(watched.last)) == ("Linear", [("", "Linear", None, 0)])


def test_the_innermost_module_that_raised_is_known(watch):
    watched = watch()
    model = nn.Sequential(nn.Identity(), Sometimes())
    model[1].error = error = ValueError("boom")
    with pytest.raises(ValueError, match="boom"):
        model(X)
    assert watched.hooks.raised_in(error) == "1"


def test_a_later_exception_from_outside_is_in_no_module(watch):
    """Python gives a new exception the place, and so the id, of one that is gone."""
    watched = watch()
    model = nn.Sequential(Sometimes())
    for _ in range(50):
        model[0].error = ValueError("inside")
        try:
            model(X)
        except ValueError:
            pass
        model[0].error = None
        gc.collect(0)
        try:
            raise ValueError("outside")
        except ValueError as error:
            assert watched.hooks.raised_in(error) is None


def test_a_forward_that_returns_none_inside_an_except_block_did_not_raise(watch):
    watched = watch()
    model = nn.Sequential(Sometimes())

    class Nothing(nn.Module):
        def forward(self, x):
            return None

    nothing = Nothing()
    try:
        raise KeyError("before")
    except KeyError as error:
        nothing(X)
        assert watched.hooks.raised_in(error) is None
    assert [row.kind for row in watched.last.frames[0].outputs] == ["none"]
    model(X)


# -- overflow -----------------------------------------------------------------------------------------------------


class Overflow(nn.Module):
    def __init__(self, value=float("inf")) -> None:
        super().__init__()
        self.value = value

    def forward(self, x):
        return x * self.value


def test_abort_raises_at_the_end_of_the_roots_forward(watch):
    watched = watch(on_overflow="abort")
    model = nn.Sequential(nn.Identity(), Overflow(), nn.Identity())
    with pytest.raises(OverflowDetected, match=r"rank 0: \+inf in output of `1` \(Overflow\), forward of batch 0"):
        model(X)
    assert [frame.module for frame in watched.last.frames] == ["0", "1", "2", ""], "the batch is whole"
    assert watched.reader.abort == 4
    (anomaly,) = watched.anomalies
    assert (anomaly.module, anomaly.cls, anomaly.role, anomaly.value) == ("1", "Overflow", "output", "+inf")
    assert (anomaly.frame, anomaly.inputs_finite, anomaly.weights_finite, anomaly.aborts) == (1, True, True, True)
    assert (anomaly.dtype, anomaly.shape) == ("float32", [3, 4])
    assert isinstance(OverflowDetected(""), ValueError)


def test_the_script_may_catch_the_abort_and_go_on(watch):
    watched = watch(on_overflow="abort")
    model = nn.Sequential(Overflow())
    for _ in range(2):
        with pytest.raises(OverflowDetected):
            model(X)
    nn.Identity()(X)
    assert watched.last.root == "Identity"


def test_continue_records_and_raises_nothing(watch):
    watched = watch(on_overflow="continue")
    model = nn.Sequential(Overflow(float("nan")), Overflow())
    for _ in range(2):
        model(X)
    assert [(a.module, a.value, a.where.batch, a.aborts) for a in watched.anomalies] == [
        ("0", "nan", 0, False),
        ("0", "nan", 1, False),
    ]
    assert watched.reader.abort == 0


def test_a_bad_weight_and_a_bad_input_are_told_apart_from_an_origin(watch):
    watched = watch()
    layer = nn.Linear(4, 4)
    layer(X * float("nan"))
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")
    layer(X)
    assert [(a.role, a.inputs_finite, a.weights_finite) for a in watched.anomalies] == [
        ("output", False, True),
        ("weight", True, False),
    ]


def test_a_mask_of_neginf_is_no_anomaly_until_it_becomes_nan(watch):
    class Attention(nn.Module):
        def forward(self, x, mask):
            return torch.softmax(x + mask, -1)

    watched = watch(on_overflow="abort")
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    model = Attention()
    model(torch.ones(4, 4), mask)
    assert watched.anomalies == []
    with pytest.raises(OverflowDetected):
        model(torch.ones(4, 4), torch.full((4, 4), float("-inf")))


def test_a_neginf_out_of_finite_weights_and_inputs_is_an_overflow(watch):
    watched = watch()
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.fill_(-3e38)
    layer(X)
    assert [a.value for a in watched.anomalies] == ["-inf"]


def test_the_run_ends_cleanly_after_the_batch_that_was_asked_for(watch, capsys):
    watch(abort_after_batch=1)
    model, other = net(), nn.Identity()
    model(X)
    for _ in range(5):
        other(X)
    with pytest.raises(SystemExit) as stop:
        model(X)
    assert stop.value.code == 0
    assert "--abort-after-batch" in capsys.readouterr().err


# -- the training is left alone -----------------------------------------------------------------------------------


def train(steps: int = 4) -> list:
    torch.manual_seed(3)
    model = nn.Sequential(Block(), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    results = []
    for _ in range(steps):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    return [*results, *(p.detach().clone() for p in model.state_dict().values()), torch.get_rng_state()]


def test_a_watched_training_computes_the_same_bits(watch):
    plain = train()
    watched = watch()
    ours = train()
    assert len(watched.pages) == 4
    for left, right in zip(plain, ours, strict=True):
        assert torch.equal(torch.as_tensor(left), torch.as_tensor(right))


def test_detach_takes_every_hook_out(watch):
    watched = watch()
    net()(X)
    count = len(watched.pages)
    watched.hooks.detach()
    net()(X)
    assert len(watched.pages) == count
    watched.hooks.detach()


def test_models_and_tensors_are_not_kept_alive(watch):
    import weakref

    watch()
    model = net()
    out = model(X)
    references = [weakref.ref(model), weakref.ref(model[0].fc1.weight), weakref.ref(out)]
    del model, out
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


compiles = pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")


@compiles
def test_a_compiled_model_keeps_its_one_graph(watch):
    watched = watch(on_overflow="abort")
    model = net()
    expected = model(X)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # other tests have had breaks
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(X), expected)
    compiled(X).sum().backward()
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert watched.faults == []
    torch._dynamo.reset()


@compiles
def test_a_compiled_part_of_a_model_works(watch):
    watched = watch()
    torch._dynamo.reset()
    model = nn.Sequential(torch.compile(Block(), fullgraph=True, backend="eager"), nn.Linear(4, 1))
    for _ in range(2):
        model(X)
    assert [frame.module for frame in watched.last.frames][-2:] == ["1", ""]
    assert watched.faults == []
    torch._dynamo.reset()


def test_a_model_built_in_inference_mode_is_watched(watch):
    watched = watch()
    with torch.inference_mode():
        model = net()
        model(X)
        model(X)
    assert watched.faults == []
    assert [len(page.frames) for page in watched.pages] == [5, 5]


def test_inference_and_no_grad_change_nothing_of_the_frames(watch):
    watched = watch()
    model = net()
    with torch.no_grad():
        model(X)
    with torch.inference_mode():
        model(X)
    assert [titles(page) for page in watched.pages] == [titles(watched.last)] * 2
    assert watched.faults == []


def test_odd_tensors_pass_through(watch):
    class Odd(nn.Module):
        def forward(self, *args):
            return args

    watched = watch(on_overflow="abort")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = [
            torch.empty(0),
            torch.tensor([True]),
            torch.arange(3),
            torch.tensor([1 + 2j]),
            torch.eye(2).to_sparse(),
            torch.ones(2, device="meta"),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            torch.ones(2).to(torch.float8_e5m2),
            SimpleNamespace(),
            "text",
        ]
        Odd()(*odd)
    assert watched.faults == []
    assert len(watched.last.frames[0].rows) == 2 * len(odd)


def test_deep_copies_and_pickles_of_a_watched_model_are_the_users_own(watch, tmp_path):
    watch()
    model = net()
    model(X)
    copied = copy.deepcopy(model)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    assert copied.state_dict().keys() == model.state_dict().keys()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_error_of_ours_is_recorded_and_the_training_goes_on(watch, monkeypatch):
    watched = watch(on_overflow="abort")
    expected = net()(X)

    def broken(*_):
        raise LookupError("ours")

    monkeypatch.setattr(RunningCalls, "parent", broken)
    for _ in range(20):
        assert torch.equal(net()(X), expected)
    assert 0 < len(watched.faults) <= 20
    assert "LookupError: ours" in watched.faults[0].message
    assert not watched.hooks._global.handles, "after many faults the hooks are taken out"


def test_errors_of_ours_are_counted_although_the_log_is_full(watch, monkeypatch):
    """The last forwards are not looked at, and a nan in them is not seen."""
    watched = watch(log_bytes=1 << 12)
    net()(X)
    while watched.recorder.append(IgnoredAlarm(watched.hooks.where(), "pattern", "module", "output", "nan")):
        pass
    monkeypatch.setattr(RunningCalls, "parent", lambda *_: 1 / 0)
    for _ in range(20):
        net()(X * float("nan"))
    assert (watched.faults, watched.anomalies) == ([], [])
    state = watched.reader.state()
    assert (state.faults, state.hooks) == (20, "detached")
    verdict = watched.verdict()
    assert verdict.kind == "unknown"
    assert "rank 0 met 20 errors in gpuwatch itself that its log had no room for" in verdict.missing


def test_after_an_error_of_ours_the_next_root_is_a_root(watch, monkeypatch):
    watched = watch()
    real = RunningCalls.parent
    monkeypatch.setattr(RunningCalls, "parent", lambda *_: 1 / 0)
    nn.Sequential(nn.Identity())(X)
    monkeypatch.setattr(RunningCalls, "parent", real)
    nn.Linear(4, 4)(X)
    assert (watched.last.root, titles(watched.last)) == ("Linear", [("", "Linear", None, 0)])


# -- tracers: what they write down must be the model alone -------------------------------------------------------


def operations(graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*TorchScript")
@pytest.mark.parametrize("make_model", [net, lambda: nn.Linear(4, 4)], ids=["net", "linear"])
def test_jit_trace_and_script_work_and_trace_the_model_alone(watch, make_model):
    def kinds(traced) -> list[str]:
        return [node.kind() for node in traced.inlined_graph.nodes()]

    model = make_model()
    expected = model(X)
    plain = kinds(torch.jit.trace(model, X))
    watch(on_overflow="abort")
    assert kinds(torch.jit.trace(model, X)) == plain
    assert torch.equal(torch.jit.script(model)(X), expected)


def test_make_fx_traces_the_model_alone(watch):
    from torch.fx.experimental.proxy_tensor import make_fx

    model = net()
    plain = operations(make_fx(model)(X).graph)
    watch(on_overflow="abort")
    assert operations(make_fx(model)(X).graph) == plain


def test_export_exports_the_model_alone(watch):
    model = net()
    plain = operations(torch.export.export(model, (X,)).graph)
    watched = watch(on_overflow="abort")
    assert operations(torch.export.export(model, (X,)).graph) == plain
    assert watched.faults == []


def test_symbolic_trace_traces_the_model_alone(watch):
    model = net()
    plain = operations(torch.fx.symbolic_trace(model).graph)
    watched = watch(on_overflow="abort")
    assert operations(torch.fx.symbolic_trace(model).graph) == plain
    assert watched.faults == []


def test_functional_transforms_work(watch):
    watched = watch(on_overflow="abort")
    model = net()
    parameters = dict(model.named_parameters())

    def loss(given, x):
        return torch.func.functional_call(model, given, (x,)).sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.ones(5, 3, 4))
    assert gradients["1.bias"].shape == (5, 2)
    assert watched.faults == []


class Changes(nn.Module):
    """Divides by a number, then adds one in place."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x / self.by).add_(1)


def per_sample(model, x):
    """The gradients of each sample."""
    one = torch.func.grad(lambda given, each: torch.func.functional_call(model, given, (each,)).sum())
    given = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return torch.func.vmap(one, in_dims=(None, 0))(given, x)


@pytest.mark.usefixtures("way")
def test_what_transforms_of_torch_func_wrap_is_read(watch):
    model = nn.Sequential(nn.Linear(4, 4), Changes(2.0), Changes(0.0))
    nn.init.ones_(model[0].weight)
    plain = per_sample(model, torch.ones(5, 4))
    watched = watch(on_overflow="continue")
    assert all(torch.equal(plain[name], each) for name, each in per_sample(model, torch.ones(5, 4)).items())
    assert [(bad.module, bad.role, bad.value) for bad in watched.anomalies] == [("2", "output", "+inf")]
    given, made = watched.row("0", "input[0]"), watched.row("1", "output")
    assert (given.abs_min, given.abs_max, given.dtype) == (1.0, 1.0, "float32")
    assert made.abs_max == watched.row("2", "input[0]").abs_max < math.inf
    assert watched.faults == []


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.vmap,
        torch.func.jacrev,
        torch.func.jacfwd,
        torch.func.hessian,
        lambda call: torch.func.vmap(torch.func.vmap(call)),
        lambda call: lambda x: torch.func.jvp(call, (x,), (x,)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # jacfwd and jvp use it; a FutureWarning since 2.15
def test_an_overflow_under_each_transform_is_named(watch, transform):
    model = nn.Sequential(nn.Linear(4, 4), Changes(0.0))
    nn.init.ones_(model[0].weight)
    watched = watch(on_overflow="abort")
    with pytest.raises(OverflowDetected, match="in output of `1`"):
        transform(model)(torch.ones(2, 3, 4))
    assert torch.equal(torch.func.vmap(torch.sin)(X), torch.sin(X))  # it has left the transform
    assert watched.faults == []
    assert watched.verdict().statement.startswith(
        "Rank 0 on host overflowed first: +inf in the output of `1` (Changes)"
    )


def test_a_mask_under_vmap_that_is_closed_is_the_cause(watch):
    watched = watch(on_overflow="continue")
    masks = torch.zeros(2, 3)
    masks[1] = -math.inf
    torch.func.vmap(nn.Softmax(-1))(masks)
    assert watched.faults == []
    assert "a row of input[0] is -inf throughout" in watched.verdict().statement


@compiles
@pytest.mark.skipif(not compiled_views().rows, reason=compiled_views().missing)
def test_the_inside_of_a_compiled_model_is_seen(watch):
    watched = watch(on_overflow="continue")
    torch._dynamo.reset()
    inner = net()
    model = torch.compile(inner, backend="eager", fullgraph=True)
    model(X)
    with torch.no_grad():
        inner[0].fc1.weight.fill_(float("nan"))
    model(X)
    assert titles(watched.last) == [
        ("0.fc1", "Linear", "0", 2),
        ("0.fc2", "Linear", "0", 2),
        ("0", "Block", "", 1),
        ("1", "Linear", "", 1),
        ("", "Sequential", None, 0),
    ]
    assert [(a.where.batch, a.module, a.role, a.value) for a in watched.anomalies] == [(1, "0.fc1", "weight", "nan")]
    torch._dynamo.reset()


@pytest.mark.slow
def test_dynamo_is_not_imported_before_the_script_does_it():
    """It would read settings of the environment that the script has not made yet."""
    code = (
        "import sys, torch; from torch import nn; from gpuwatch.worker.watch import watch\n"
        "with watch() as handle: nn.Linear(2, 2)(torch.ones(1, 2)); print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "False\n"


class OddNames(nn.Module):
    """Parameters that are called as arguments and returned values are."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Parameter(torch.ones(3))
        self.output = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.input + self.output


def test_a_parameter_that_is_called_input_or_output_is_a_parameter(watch):
    watched = watch(on_overflow="continue")
    model = OddNames()
    model(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        model.output[1] = math.inf
    model(torch.ones(2, 3)).sum().backward()
    (anomaly, *_) = watched.anomalies
    assert (anomaly.role, anomaly.phase, anomaly.weights_finite) == ("parameters.output", "forward", False)
    assert {row.role for frame in watched.frames("backward") for row in frame.rows} >= {
        "grad parameters.input",
        "grad parameters.output",
    }
    assert watched.faults == []


class Parallel(nn.Module):
    """A layer whose result something changes, as a collective does: without a new version of the tensor."""

    def __init__(self, change) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)
        self.next = nn.Linear(3, 3)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(x)
        version = x._version
        self.change(x)
        assert x._version == version
        return self.next(x)


def _other_memory(x: torch.Tensor) -> None:
    x.data = torch.full((2, 3), math.inf)


CHANGES = {
    "as a collective does": lambda x: x.data.fill_(math.inf),
    "other memory": _other_memory,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_argument_that_changed_without_a_new_version_is_read_again(watch, change):
    watched = watch(on_overflow="continue")
    with torch.no_grad():
        Parallel(change)(torch.ones(2, 3))
    (anomaly, *_) = watched.anomalies
    assert (anomaly.module, anomaly.inputs_finite) == ("next", False), "the module is handed it and has not made it"
    assert not watched.row("next", "input[0]").finite
    assert watched.row("proj", "output").finite


@pytest.mark.parametrize("native", [True, False])
def test_other_memory_is_seen_on_a_device_too(watch, late, monkeypatch, native):
    """Without a wait for the device: the address is another one."""
    if not native:
        monkeypatch.setattr("gpuwatch.worker.hooks.native_writer.NativeFrameWriter", None)
    watched = watch(on_overflow="continue")
    with torch.no_grad():
        Parallel(_other_memory)(torch.ones(2, 3))
    (anomaly, *_) = watched.anomalies
    assert (anomaly.module, anomaly.inputs_finite) == ("next", False), "the module is handed it and has not made it"
    assert not watched.row("next", "input[0]").finite
    assert watched.row("proj", "output").finite


class TakesMemoryOver(nn.Module):
    """A tensor leaves its memory, as by `x.data = ...`, and the next result lies there, as an allocator may have it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)
        self.next = Fills()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(x)
        self.next.free = x.data
        x.data = torch.zeros(2, 3)
        return self.next(x)


class Fills(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.free.numpy().fill(math.inf)
        return self.free


def test_memory_that_a_tensor_has_left_is_not_known_by_its_numbers(watch, way):
    watched = watch(on_overflow="continue")
    with torch.no_grad():
        TakesMemoryOver()(torch.ones(2, 3))
    watched.hooks.settle()
    assert [(anomaly.module, anomaly.inputs_finite) for anomaly in watched.anomalies][:1] == [("next", True)]
    assert watched.faults == []


def test_calls_of_another_thread_within_a_forward_are_told_by_the_second_look(watch):
    class Branch(torch.nn.Module):
        def forward(self, x):
            return x * float("inf")

    class Net(torch.nn.Module):
        def __init__(self, threads):
            super().__init__()
            self.branch, self.last, self.threads = Branch(), torch.nn.Identity(), threads

        def forward(self, x):
            if not self.threads:
                return self.last(self.branch(x))
            out = []
            thread = threading.Thread(target=lambda: out.append(self.branch(x)))
            thread.start()
            thread.join()
            return self.last(out[0])

    for threads in (True, False):
        watched = watch()
        Net(threads)(torch.ones(2))
        assert watched.anomalies[0].again.threads is threads
        watched.hooks.detach()


class Blocking(torch.nn.Module):
    """Its forward goes on once another forward has run in another thread."""

    def __init__(self, other):
        super().__init__()
        self.other, self.fc = other, nn.Linear(4, 4)

    def forward(self, x):
        if self.other is not None:
            thread = threading.Thread(target=self.other)
            thread.start()
            thread.join()
        return self.fc(x)


@pytest.mark.parametrize("beside", [True, False])
def test_a_forward_beside_one_of_another_thread_keeps_a_run_from_being_clean(watch, beside):
    watched = watch()
    side = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    forward = lambda: side(torch.full((2, 4), math.nan if beside else 1.0))  # noqa: E731
    if not beside:
        forward()
    Blocking(forward if beside else None)(torch.ones(2, 4))
    assert watched.anomalies == []
    verdict = watched.verdict()
    assert verdict.kind == ("unknown" if beside else "clean")
    left_out = "rank 0 made 3 module calls in a thread while another thread was in a forward"
    assert [clause.partition(":")[0] for clause in verdict.missing] == ([left_out] if beside else [])


@pytest.mark.parametrize("beside", ["before", "after", None])
def test_an_overflow_after_a_forward_that_was_left_out_is_not_established(watch, beside):
    watched = watch()
    side = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    forwards = [Blocking(lambda: side(torch.ones(2, 4)))] if beside is not None else []
    bad = nn.Sequential(nn.Identity(), Multiplies())
    for net_ in [*forwards, bad] if beside == "before" else [bad, *forwards]:
        net_(torch.ones(2, 4))
    verdict = watched.verdict()
    assert (verdict.kind, verdict.module) == ("overflow", "1")
    assert verdict.certainty == ("supported" if beside == "before" else "established")
    assert any("one may have made the value" in line for line in verdict.evidence) == (beside == "before")


def test_a_weight_that_is_computed_is_told_by_the_second_look(watch):
    watched = watch()
    linear = torch.nn.Linear(2, 2)
    weight = torch.ones(2, 2, requires_grad=True) * float("inf")
    torch.func.functional_call(linear, {"weight": weight}, (torch.ones(1, 2),))
    assert watched.anomalies[0].again.computed == ["weight"]
