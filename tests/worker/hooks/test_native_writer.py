"""The compiled way of ordinary frames against the same in Python: byte for byte the same records."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.frames import Page
from gpuwatch.core.recorder import layout
from gpuwatch.worker.hooks import backward as hooks_module
from gpuwatch.worker.hooks import native_writer as taker_module
from gpuwatch.worker.hooks.backward import _GraphRecord
from gpuwatch.worker.record.tensor_stats import measure
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ..conftest import Watched

pytestmark = pytest.mark.skipif(
    taker_module.NativeFrameWriter is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="native/core.c was not built where gpuwatch was installed, or this torch lends it no tensors",
)


@contextmanager
def watching(path: Path, compiled: bool, **options: Any) -> Iterator[Watched]:
    native_writer = taker_module.NativeFrameWriter
    try:
        if not compiled:
            taker_module.NativeFrameWriter = None
        watched = Watched(path, **options)
    finally:
        taker_module.NativeFrameWriter = native_writer
    try:
        assert (watched.hooks._gradients.writer is not None) == compiled
        yield watched
    finally:
        watched.close()


def recorded(watched: Watched) -> tuple[list[Page], list[Any], bytes]:
    """Pages and events without their times, and the bytes of all segments without theirs."""
    watched.hooks.settle()
    events = [(type(e), e.message) if isinstance(e, OwnFault) else (type(e), repr(e)) for e in watched.events]
    events = [(kind, text.split("time_ns")[0]) for kind, text in events]
    size = layout.SEGMENT_BYTES
    start = len(watched.recorder.memory) - 64 * size
    whole = bytes(watched.recorder.memory)[start:]
    segments = [bytearray(whole[at : at + size]) for at in range(0, len(whole), size)]
    for segment in segments:
        segment[96:104] = bytes(8)  # STARTED_NS
    return watched.pages, events, b"".join(segments)


# -- whole trainings ------------------------------------------------------------------------------------------------

KINDS = [
    "linear",
    "norm",
    "residual",
    "twice",
    "in_place",
    "view",
    "transposed",
    "expanded",
    "pair",
    "nested",
    "mapping",
    "none",
    "keywords",
    "mask",
    "overflow",
    "near",
    "half",
    "double",
    "integers",
    "empty",
    "fly",
    "frozen",
    "tied",
    "constant",
    "subclass",
    "scalar",
    "checkpoint",
    "split",
    "kept",
    "no_grad",
]


class Own(torch.Tensor):
    pass


class Step(nn.Module):
    def __init__(self, kind: str, first: nn.Linear) -> None:
        super().__init__()
        self.kind = kind
        self.inner = first if kind == "tied" else nn.Linear(4, 4)
        self.leaf = nn.Identity()
        if kind == "norm":
            self.norm = nn.LayerNorm(4)
        if kind == "frozen":
            self.inner.requires_grad_(False)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, flag: bool = True) -> Any:
        kind = self.kind
        y = self.inner(x)
        if kind == "norm":
            return self.norm(y)
        if kind == "residual":
            return x + self.leaf(y)
        if kind == "twice":
            return self.inner(self.inner(y))
        if kind == "in_place":
            return self.leaf(y).add_(1)
        if kind == "view":
            return self.leaf(y.view(-1)).view_as(y)
        if kind == "transposed":
            return self.leaf(y.t().contiguous().t()) + self.leaf(y.t()).t()
        if kind == "expanded":
            return self.leaf(y[:1].expand(3, 4))
        if kind == "mask" and mask is not None:
            return y + self.leaf(mask).clamp(min=-5)
        if kind == "overflow":
            return self.leaf(y * 1e38 * 1e3).clamp(-1, 1)
        if kind == "near":
            return self.leaf(y.tanh() * 3e38) * 1e-38
        if kind == "half":
            return self.leaf(y.to(torch.bfloat16)).float()
        if kind == "double":
            return self.leaf(y.double()).float()
        if kind == "integers":
            return y * self.leaf(torch.arange(4) - 1)
        if kind == "empty":
            return y + self.leaf(y[:0]).sum()
        if kind == "fly":
            return nn.Softmax(-1)(nn.Tanh()(y))
        if kind == "constant":
            return y + self.leaf(torch.ones(4))
        if kind == "subclass":
            return self.leaf(y.as_subclass(Own)).as_subclass(torch.Tensor)
        if kind == "scalar":
            return y * self.leaf(y.mean())
        if kind == "checkpoint":
            return torch.utils.checkpoint.checkpoint(self.leaf, y, use_reentrant=False) + y
        if kind == "kept":
            if self.kept is None:
                self.kept = (self.inner.weight.detach().clone().requires_grad_() * 2).sum()
            return y + self.leaf(self.kept).detach()
        if kind == "no_grad":
            with torch.no_grad():
                seen = self.leaf(y)
            return y + seen
        return {
            "pair": lambda: (y, x),
            "nested": lambda: (y, (x, [y, None])),
            "mapping": lambda: OrderedDict(hidden=y, more=x),
            "none": lambda: (y, None, 3, "text", 1.5),
            "split": lambda: y.split(2, -1),
        }.get(kind, lambda: y)()


class Model(nn.Module):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        first = nn.Linear(4, 4)
        self.first = first
        self.steps = nn.ModuleList(Step(kind, first) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for step in self.steps:
            if step.kind == "mask":
                x = step(x, mask=torch.full((4,), float("-inf")))
            elif step.kind == "keywords":
                x = step(x=x, flag=False)
            else:
                x = step(x)
            if isinstance(x, OrderedDict):
                x = x["hidden"]
            elif isinstance(x, tuple):
                x = torch.cat(x, -1) if step.kind == "split" else x[0]
        return x


def train(kinds: list[str], seed: int, between: str, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model = Model(kinds)
    optimizer = torch.optim.SGD((p for p in model.parameters()), lr=0.01)
    losses = []
    for number in range(steps):
        with torch.inference_mode(between == "inference" and number == 1):
            loss = model(torch.randn(3, 4)).square().mean()
        if not loss.requires_grad:
            continue
        loss.backward(retain_graph=between == "retain")
        if between == "retain":
            loss.backward()
        if between == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=between != "zero")
        if between == "weights":
            with torch.no_grad():
                model.first.weight.mul_(2)
        if between == "data":
            model.first.weight.data = model.first.weight.data.clone()
        losses.append(loss.detach())
    return losses


@pytest.mark.slow
@pytest.mark.comes_first
@given(
    kinds=st.lists(st.sampled_from(KINDS), max_size=6),
    seed=st.integers(0, 1000),
    between=st.sampled_from(["", "", "retain", "clip", "zero", "weights", "data", "inference"]),
    watch=st.sampled_from(
        [("forward", "weights", "grads"), ("forward",), ("weights",), ("grads",), ("forward", "grads")]
    ),
    ignore=st.sampled_from([(), (), ("steps.0*:output",)]),
)
@settings(suppress_health_check=list(HealthCheck))
def test_both_ways_write_the_same(tmp_path_factory, kinds, seed, between, watch, ignore):
    folder = tmp_path_factory.mktemp("both")
    found = []
    for compiled in (False, True):
        with watching(folder / f"{compiled}.recorder", compiled, watch=watch, ignore=ignore) as watched:
            losses = train(kinds, seed, between)
            pages, events, written = recorded(watched)
            found.append((pages, events, written, losses))
    (pages, events, written, losses), (pages_c, events_c, written_c, losses_c) = found
    for page, page_c in zip(pages, pages_c, strict=True):
        for frame, frame_c in zip(page.frames, page_c.frames, strict=True):
            assert frame == frame_c
        assert page == page_c
    assert events == events_c
    assert written == written_c
    assert all(torch.equal(a, b) or (a != a and b != b) for a, b in zip(losses, losses_c, strict=True))


@pytest.mark.quick(8)
@pytest.mark.sample(8)
@pytest.mark.parametrize("between", ["", "inference"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_and_is_seen_without_a_fault(tmp_path, kind, between):
    found = []
    for compiled in (False, True):
        with watching(tmp_path / f"{compiled}.recorder", compiled) as watched:
            train([kind, "linear", kind], 1, between, steps=12)
            assert watched.faults == []
            found.append(recorded(watched)[1:])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_page_of_many_segments(tmp_path):
    found = []
    for compiled in (False, True):
        with watching(tmp_path / f"{compiled}.recorder", compiled) as watched:
            train(["residual"] * 60, 1, "")
            found.append(recorded(watched)[1:])
            assert watched.reader[layout.HeadField.SEGMENT] > 8
    assert found[0] == found[1]


def test_what_is_ordinary_is_taken(tmp_path):
    """Else all of the above would compare the Python way with itself."""
    left: list[tuple[str, str]] = []

    def noting(name: str, real: Any) -> Any:
        return lambda info, *rest: (left.append((name, info.name)), real(info, *rest))[1]

    with watching(tmp_path / "x.recorder", True) as watched:
        hooks, gradients = watched.hooks, watched.hooks._gradients
        torch.manual_seed(0)
        model = Model(["residual", "norm", "none", "keywords"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(3):
            if number == 2:  # names and weights are known
                hooks._call_frames.record = noting("frame", hooks._call_frames.record)
                gradients.of_output = noting("output", gradients.of_output)
                gradients.of_parameter = noting("parameter", gradients.of_parameter)
                hooks.rows.weight = noting("weight", hooks.rows.weight)
                hooks.rows.gradient = noting("gradient", hooks.rows.gradient)
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert {frame.phase for frame in watched.last.frames} == {"forward", "loss", "backward", "optimizer"}
    assert left == [("gradient", "(loss)")], "it takes the page up again, which all others find open"


# -- what may go wrong ----------------------------------------------------------------------------------------------


def hooks_of(tensor: torch.Tensor) -> list[Any]:
    hooks = (tensor._backward_hooks or {}).values()
    return [
        hook for hook in hooks if not isinstance(getattr(hook, "record", None), _GraphRecord)
    ]  # which records no gradient


def test_hooks_of_the_users_and_ours_live_side_by_side(tmp_path):
    with watching(tmp_path / "x.recorder", True) as watched:
        model = nn.Linear(4, 4)
        model(torch.ones(2, 4)).sum().backward()
        seen = []
        out = model(torch.ones(2, 4))
        (ours,) = hooks_of(out)
        first = out.register_hook(lambda g: seen.append("first"))
        out.register_hook(lambda g: seen.append("second") or g * 2)
        assert hooks_of(out)[0] is ours
        assert len(hooks_of(out)) == 3
        first.remove()
        out.sum().backward()
        assert seen == ["second"]
        assert watched.row("", "grad output").abs_max == 1.0


def test_no_hook_of_ours_has_the_number_of_one_of_the_users(tmp_path):
    with watching(tmp_path / "x.recorder", True):
        model, kept = nn.Linear(4, 4), []
        numbers, users = [], []
        for _ in range(300):  # more than are taken from torch's count at once
            out = model(torch.ones(2, 4))
            numbers += list(out._backward_hooks)
            apart = torch.ones(2, requires_grad=True)
            users.append(apart.register_hook(lambda g: None).id)
            kept.append((out, apart))
        assert len(numbers) == len(set(numbers)) >= 300
        assert not set(numbers) & set(users)


def test_a_hook_keeps_neither_tensor_nor_module_alive(tmp_path):
    with watching(tmp_path / "x.recorder", True):
        model = nn.Linear(4, 4)
        for _ in range(2):
            out = model(torch.ones(2, 4))
        refs = [weakref.ref(model), weakref.ref(out), weakref.ref(model.weight)]
        assert type(hooks_of(out)[0]).__module__ == "gpuwatch.worker.native.core"
        del model, out
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3


def test_all_of_it_goes_when_the_hooks_go(tmp_path):
    with watching(tmp_path / "x.recorder", True) as watched:
        train(["residual"], 1, "")
        gone = weakref.ref(watched.hooks)
    del watched
    gc.collect()
    assert gone() is None


def test_a_tensor_with_our_hook_can_be_saved_without_a_warning(tmp_path):
    with watching(tmp_path / "x.recorder", True):
        model = nn.Linear(4, 4)
        for _ in range(2):
            out = model(torch.ones(2, 4))
        torch.save(out, tmp_path / "x.pt")


def test_a_hook_whose_page_or_place_is_taken_away_does_nothing(tmp_path):
    with watching(tmp_path / "x.recorder", True) as watched:
        model = nn.Linear(4, 4)
        for name in ("page", "info", "role"):
            for _ in range(2):
                out = model(torch.ones(2, 4))
            delattr(hooks_of(out)[0], name)
            out.sum().backward()
        assert sorted(watched.rows("backward", page=-1)) == [("", "grad bias"), ("", "grad weight")]


def test_a_hook_takes_one_tensor_and_other_things_are_left_to_python(tmp_path):
    with watching(tmp_path / "x.recorder", True) as watched:
        model = nn.Linear(4, 4)
        for _ in range(2):
            out = model(torch.ones(2, 4))
        hook = hooks_of(out)[0]
        for arguments in ((), (1, 2)):
            with pytest.raises(TypeError):
                hook(*arguments)
        with pytest.raises(TypeError):
            hook(gradient=torch.ones(1))
        with pytest.raises(TypeError):
            type(hook)()
        assert watched.faults == []
        assert hook(torch.ones(2, 4).as_subclass(Own)) is None
        assert hook(torch.ones(2, 4).to_sparse()) is None
        assert hook(torch.ones(2, 4, device="meta")) is None
        assert hook("no tensor") is None
        assert len(watched.faults) == 1


def test_a_recorder_that_is_closed_costs_a_fault_and_no_more(tmp_path):
    with watching(tmp_path / "x.recorder", True) as watched:
        model = nn.Linear(4, 4)
        for _ in range(2):
            out = model(torch.ones(2, 4)).sum()
        watched.recorder.close()
        out.backward()
        model(torch.ones(2, 4))
        watched.hooks.detach()
        assert model.weight.grad is not None


def test_after_a_detach_the_hooks_that_are_left_write_nothing(tmp_path):
    with watching(tmp_path / "x.recorder", True) as watched:
        model = nn.Linear(4, 4)
        for _ in range(2):
            out = model(torch.ones(2, 4)).sum()
        watched.hooks.detach()
        out.backward()
        assert watched.frames("backward") == []


def test_a_mode_is_not_shown_what_is_looked_at(tmp_path):
    from torch.overrides import TorchFunctionMode

    class Noting(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.calls.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    def calls() -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        for _ in range(2):
            x = torch.ones(2, 4)
            with Noting() as mode:
                model(x)
        return mode.calls

    plain = calls()
    with watching(tmp_path / "x.recorder", True) as watched:
        assert calls() == plain
        assert len(watched.last.frames) == 1


def test_errors_inside_are_told_and_the_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(taker_module, "issued", lambda: 1 // 0)
    with watching(tmp_path / "x.recorder", True) as watched:
        losses = train(["residual", "pair"], 1, "")
        assert watched.faults == []  # Python asked `issued` of its own, which is sound
        assert len(watched.last.frames) > 6
    assert len(losses) == 3


def test_backwards_in_many_threads(tmp_path):
    with watching(tmp_path / "x.recorder", True) as watched:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        before = len(watched.frames("backward"))
        outputs = [model(torch.ones(2, 8)).sum() for _ in range(6)]
        threads = [threading.Thread(target=out.backward) for out in outputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = [len([f for f in page.frames if f.phase == "backward"]) for page in watched.pages[-6:]]
        assert sum(counts) == 6 * before
        assert watched.faults == []
        for page in watched.pages:
            assert [frame.index for frame in page.frames] == list(range(len(page.frames)))
            assert all(row.kind == "measured" for frame in page.frames for row in frame.rows)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_numbers_of_a_tensor_are_those_that_python_reads(tmp_path, dtype):
    torch.manual_seed(0)
    base = torch.randn(6, 4, dtype=dtype, requires_grad=True)
    with watching(tmp_path / "x.recorder", True) as watched:
        numbers = watched.hooks._gradients.writer.numbers
        for tensor in (base, base.t(), base[2:4], nn.Parameter(base.detach()), torch.tensor(-0.0, dtype=dtype)):
            assert numbers(tensor) == measure(tensor.detach())[:3]


def test_numbers_of_what_is_not_ordinary_are_left_to_python(tmp_path):
    freed = torch.ones(4)[1:]
    freed.untyped_storage().resize_(0)
    odd = [torch.tensor([1.0, float("inf")]), torch.tensor([float("nan")]), torch.ones(0), torch.ones(4)[::2], freed]
    odd += [torch.ones(2, dtype=torch.long), torch.ones(2, dtype=torch.complex64), torch.ones(2, device="meta")]
    odd += [torch.eye(2).to_sparse(), torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {}))]
    with watching(tmp_path / "x.recorder", True) as watched:
        numbers = watched.hooks._gradients.writer.numbers
        assert [numbers(each) for each in (*odd, None, "text", [torch.ones(2)])] == [None] * (len(odd) + 3)
        with torch.device("cpu"):  # a mode
            assert numbers(torch.ones(2)) is None
        assert numbers(torch.ones(2)) is not None


def test_a_forked_child_writes_nothing(tmp_path):
    with watching(tmp_path / "x.recorder", True) as watched:
        model = nn.Linear(4, 4)
        for _ in range(2):
            out = model(torch.ones(2, 4)).sum()
        before = bytes(watched.recorder.memory)
        child = os.fork()
        if not child:
            try:
                out.backward()
                model(torch.ones(2, 4)).sum().backward()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert bytes(watched.recorder.memory) == before


def test_wrong_parts_are_refused(tmp_path):
    good: dict[str, Any] = {}

    class Catch:
        def __init__(self, **parts: Any) -> None:
            good.update(parts)

        def numbers(self, tensor: Any) -> None:
            """As of a tensor that Python must read."""

    real, taker_module.NativeFrameWriter = taker_module.NativeFrameWriter, Catch
    try:
        watched = Watched(tmp_path / "x.recorder")
    finally:
        taker_module.NativeFrameWriter = real
    watched.hooks._gradients.writer = None
    try:
        for name in (
            "seen",
            "shapes",
            "waived",
            "numbers",
            "waiting",
            "near",
            "exchange",
            "memory",
            "cursor",
            "compiler",
        ):
            with pytest.raises((TypeError, ValueError)):
                taker_module.NativeFrameWriter(**{**good, name: 1.5})
        with pytest.raises(TypeError):
            taker_module.NativeFrameWriter()
        native_writer = taker_module.NativeFrameWriter(**good)
        with pytest.raises(TypeError):
            native_writer.frame()
        with pytest.raises(TypeError):
            native_writer.frame(*[None] * 11)
        with pytest.raises(TypeError):
            native_writer.weights(None, None, 1)
        with pytest.raises(TypeError):
            native_writer.all_local(None)
        with pytest.raises(TypeError):
            native_writer.hook()
        assert native_writer.frame(*[None] * 6, 1, 2, 3, 4, 5) is False
        assert native_writer.weights(None, [None], 1) is False
        assert native_writer.all_local([None, (1, 2, 3)]) is False
        assert native_writer.all_local([("name", None)]) is False
    finally:
        watched.close()


def test_under_sync_every_frame_is_checked_in_python(tmp_path):
    with watching(tmp_path / "x.recorder", False, sync=True):
        pass
    watched = Watched(tmp_path / "y.recorder", sync=True)
    try:
        assert watched.hooks._gradients.writer is None
        assert hooks_module.native_writer_of is taker_module.native_writer_of
    finally:
        watched.close()
