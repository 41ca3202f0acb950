"""The stack of calls, and an optimizer's parameters by module, against the same in Python."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from gpuwatch.worker.hooks import forward
from gpuwatch.worker.record import native_writer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ..conftest import Watched
from ..record.test_native_writer import KINDS, recorded, train

pytestmark = pytest.mark.skipif(
    native_writer.FrameWriter is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="worker/native was not built where gpuwatch was installed, or this torch lends it no tensors",
)


class StackInC(forward.Hooks):
    """Hooks whose ordinary calls go on and off the stack in C."""

    entered = left = 0

    def _before(self, module: nn.Module, args: Any) -> None:
        if self.writer is not None and self.writer.enter(self._stack, module, self._thread):
            self.entered += 1
        else:
            super()._before(module, args)

    def _after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if self.writer is not None and len(rest) == 2:
            where = (*rest, self._phase, self._thread)
            if self.writer.leave(self._stack, module, args, *where) > 0:
                self.left += 1
                return
        super()._after(module, args, *rest)


def watched_by(monkeypatch: pytest.MonkeyPatch, hooks: type[forward.Hooks], path: Any, **options: Any) -> Watched:
    with monkeypatch.context() as patch:
        patch.setattr(forward, "Hooks", hooks)
        return Watched(path, **options)


@given(
    kinds=st.lists(st.sampled_from(KINDS), max_size=6),
    seed=st.integers(0, 1000),
    between=st.sampled_from(["", "retain", "clip", "weights", "inference"]),
    watch=st.sampled_from([("forward", "weights", "grads"), ("forward",), ("weights",)]),
    modules=st.sampled_from([(), ("steps.1*",)]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_both_stacks_write_the_same(tmp_path_factory, kinds, seed, between, watch, modules):
    folder = tmp_path_factory.mktemp("both")
    found = []
    for hooks in (forward.Hooks, StackInC):
        options = {"watch": watch, "modules": modules}
        watched = watched_by(pytest.MonkeyPatch(), hooks, folder / f"{hooks.__name__}.recorder", **options)
        try:
            train(kinds, seed, between)
            found.append(recorded(watched))
            assert watched.hooks._stack == []
        finally:
            watched.close()
    assert found[0] == found[1]


@pytest.fixture
def watched(tmp_path, monkeypatch):
    watched = watched_by(monkeypatch, StackInC, tmp_path / "x.recorder")
    yield watched
    watched.close()


def test_what_is_ordinary_goes_through_c(watched):
    train(["residual", "norm", "nested"], 1, "", steps=3)
    calls = len(watched.frames("forward"))
    assert watched.hooks.entered == 3 * (calls - 1)  # all but the root
    assert watched.hooks.left >= 2 * (calls - 1)  # the names are known from the second batch on
    assert watched.faults == []


def test_a_call_that_raises_leaves_the_stack_to_python(watched):
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    model = nn.Sequential(nn.Linear(4, 4), Raises())
    for _ in range(3):
        with pytest.raises(ValueError, match="on purpose"):
            model(torch.ones(2, 4))
        assert watched.hooks._stack == []
    assert [frame.module for frame in watched.frames("forward")] == ["0", "1", ""]


def test_another_thread_inside_a_forward_is_not_put_on_the_stack(watched):
    inner = nn.Linear(4, 4)

    class Threads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: inner(x))
            thread.start()
            thread.join()
            return self.inner(x)

    model = Threads()
    for _ in range(3):
        model(torch.ones(2, 4))
    assert [frame.module for frame in watched.frames("forward")] == ["inner", ""]
    assert watched.faults == []


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_torch_traces_is_not_written(watched):
    class TracesOnce(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))
            self.traces = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.traces:
                torch.jit.trace(self.inner, (x,), check_trace=False)
            return self.inner(x)

    model = TracesOnce()
    for _ in range(2):
        model(torch.ones(2, 4))
    before = len(watched.pages)
    torch.jit.trace(model.inner, (torch.ones(2, 4),), check_trace=False)
    assert len(watched.pages) == before
    for model.traces in (True, False):
        model(torch.ones(2, 4))
        assert [frame.module for frame in watched.frames("forward")] == ["inner.0", "inner", ""]
        assert watched.hooks._stack == []
    assert watched.faults == []


def test_wrong_arguments_are_refused_and_strange_ones_left(watched):
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4))
    writer = watched.hooks.writer
    for method, count in ((writer.enter, 2), (writer.leave, 6), (writer.by_module, 1)):
        with pytest.raises(TypeError):
            method(*[None] * count)
    thread = threading.get_ident()
    assert writer.enter(None, model, thread) is False
    assert writer.enter([], model, thread) is False
    assert writer.enter([object()], model, thread) is False
    assert writer.enter([object()], model, "here") is False
    assert writer.enter([object()], model, thread + 1) is False
    assert writer.leave([object()] * 2, model, (), {}, 1, 0, thread) == 0
    assert writer.leave([object()], model, (), {}, 1, 0, thread) == 0
    with pytest.raises(TypeError):
        writer.leave([object()], model, (), {}, 1, "forward", thread)
    assert writer.by_module([{"params": [model.weight]}], {}) is None
    assert writer.by_module([{"params": [model.weight]}], {id(model.weight): None}) is None
    assert writer.by_module([None], {}) is None
    assert writer.by_module([], {}) == {}


def test_parameters_by_module_are_those_of_python(watched):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model(torch.ones(2, 4))
    optimizer = torch.optim.SGD([{"params": list(model[:2].parameters())}, {"params": [model[2].bias]}], lr=0.1)
    steps, owners = watched.hooks._steps, watched.hooks._roots.parameters
    expected = steps._by_module(optimizer)
    found = watched.hooks.writer.by_module(optimizer.param_groups, owners)
    assert [info.name for info in found] == ["0", "1", "2"]
    for info, parameters in expected.items():
        assert [(name, id(p)) for name, p in found[info]] == [(name, id(p)) for name, p in parameters]
    next(iter(expected)).watched = False
    assert [info.name for info in watched.hooks.writer.by_module(optimizer.param_groups, owners)] == ["1", "2"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert watched.hooks.writer.by_module(optimizer.param_groups, owners) is None
