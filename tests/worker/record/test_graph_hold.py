"""A graph is kept beyond its batch only if that keeps no memory of the script's alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.record.autograd_graph import AutogradGraph, GraphCalls, GraphHold, holds_nothing, running_graph
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..conftest import use_late_device

SIZE = 8


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, how):
        if how == "attribute":
            ctx.x = x * 2
        elif how == "in a list":
            ctx.kept = [(x * 2,)]
        else:
            ctx.save_for_backward(x * 2)
            ctx.factor, ctx.shape = 2.0, x.shape
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


class Custom(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return _Keeps.apply(x, self.how)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.fc, self.reentrant = nn.Linear(SIZE, SIZE), reentrant

    def forward(self, x):
        return checkpoint(self.fc, x, use_reentrant=self.reentrant)


def model_of(middle: nn.Module) -> nn.Module:
    layer = nn.TransformerEncoderLayer(SIZE, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(SIZE, SIZE), layer, middle, nn.LayerNorm(SIZE), nn.Linear(SIZE, 1))


def tensors() -> dict[int, weakref.ref[torch.Tensor]]:
    """All tensors that Python knows, and those that the nodes of a graph have saved as far as Python sees them."""
    gc.collect()
    return {id(each): weakref.ref(each) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}


@pytest.mark.parametrize(
    ("middle", "nothing"),
    [
        (nn.GELU(), True),
        (Custom("saved"), True),
        (Checkpointed(False), True),
        (Custom("attribute"), False),
        (Custom("in a list"), False),
    ],
    ids=["plain", "saved", "checkpointed", "attribute", "list"],
)
def test_what_a_graph_holds_after_its_backward(middle, nothing):
    model = model_of(middle)
    saved: list[weakref.ref[torch.Tensor]] = []

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            copy = tensor.detach().clone()
            saved.append(weakref.ref(copy))
            return copy
        return tensor

    before = tensors()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        loss = model(torch.randn(2, 3, SIZE)).sum()
    root = loss.grad_fn
    loss.backward()
    del loss

    assert saved
    assert [each for each in saved if each() is not None] == [], "a backward frees what its nodes have saved"
    left = [key for key, each in tensors().items() if key not in before and each() is not None]
    gradients = {id(parameter.grad) for parameter in model.parameters()}
    assert (set(left) <= gradients) == nothing
    assert holds_nothing((root,)) == nothing


def test_a_leaf_that_is_no_parameter_is_held_by_its_node():
    x = torch.randn(2, SIZE, requires_grad=True)
    loss = nn.Linear(SIZE, 1)(x).sum()
    root = loss.grad_fn
    loss.backward()
    assert not holds_nothing((root,))


class _Seen(torch.autograd.Function):
    """Tells which graph its backward runs in."""

    found: AutogradGraph | None = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _Seen.found = running_graph(GraphCalls(0))
        return gradient


@pytest.mark.parametrize(
    ("go", "kept"),
    [
        (lambda loss, _: loss.backward(), False),
        (lambda loss, _: loss.backward(retain_graph=True), True),
        (lambda loss, _: loss.backward(create_graph=True), True),
        (lambda loss, weight: loss.backward(inputs=[weight]), True),
        (lambda loss, weight: torch.autograd.grad(loss, [weight]), True),
    ],
    ids=["plain", "retained", "created", "inputs", "grad"],
)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_graph_that_the_script_may_use_again_is_known(go, kept):
    fc = nn.Linear(SIZE, 1)
    go(_Seen.apply(fc(torch.randn(2, SIZE))).sum(), fc.weight)
    graph, _Seen.found = _Seen.found, None
    assert graph is not None
    assert graph.kept == kept
    assert GraphHold().may_keep(graph) != kept or graph.roots[0].name() == "_SeenBackward"
    fc.weight.grad = None  # with create_graph it refers to its own graph


def test_a_model_is_looked_at_again_now_and_then():
    hold = GraphHold()
    plain, custom = nn.Linear(SIZE, 1), nn.Sequential(Custom("attribute"), nn.Linear(SIZE, 1))

    def graph(model):
        return AutogradGraph((model(torch.randn(2, SIZE, requires_grad=model is custom)).sum().grad_fn,), GraphCalls(0))

    assert [hold.may_keep(graph(plain)) for _ in range(3)] == [True] * 3
    assert False in [hold.may_keep(graph(custom)) for _ in range(70)], "its graph is as large, and is looked at again"


class _Watched:
    """A watched model whose device is kept busy on request."""

    def __init__(self, watch, monkeypatch, middle=None):
        self.device = LateDevice(3)
        use_late_device(monkeypatch, self.device)
        self.watched = watch()
        self.gradients = self.watched.hooks._gradients
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE), middle or nn.GELU(), nn.Linear(SIZE, 1))

    def batch(self):
        self.model(torch.randn(2, SIZE)).sum().backward()


@pytest.fixture
def busy(watch, monkeypatch):
    def make(middle=None):
        found = _Watched(watch, monkeypatch, middle)
        found.device.held.add(0)
        return found

    return make


def test_graphs_are_held_until_their_numbers_have_arrived(busy):
    job = busy()
    for batches in range(1, 7):
        job.batch()
        assert len({graph.calls.page for graph in job.gradients.graphs.held}) == min(batches, 5), (
            "four, and that of this batch"
        )
    job.device.held.clear()
    job.watched.hooks.judging.finish()
    job.gradients.release()
    assert job.gradients.graphs.held == []
    assert job.watched.faults == job.watched.anomalies == []


def test_a_graph_that_holds_memory_is_let_go_of_when_the_next_batch_begins(busy):
    job = busy(Custom("attribute"))
    job.batch()
    assert len(job.gradients.graphs.held) == 1
    job.batch()
    assert len(job.gradients.graphs.held) == 1
    (held,) = job.gradients.graphs.held
    assert held.calls.page == 1
    job.device.held.clear()
    assert job.watched.faults == []


def test_no_graph_is_held_while_the_script_captures_one(busy):
    job = busy()
    job.batch()
    job.device.capturing = True
    job.model(torch.randn(2, SIZE))
    assert job.gradients.graphs.held == []
    job.device.capturing = False
    job.device.held.clear()
