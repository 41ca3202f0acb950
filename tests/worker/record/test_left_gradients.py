"""A gradient that was not finite before the first backward that is watched, on the host and on a late device."""

from __future__ import annotations

import math

import gpuwatch
import pytest
import torch
from gpuwatch.tests.fakes.late_device import LateDevice
from torch import nn

from ..conftest import use_late_device

pytestmark = pytest.mark.quick_here(12)


@pytest.fixture(params=["host", "late"], autouse=True)
def path(request, monkeypatch):
    if request.param == "late":
        use_late_device(monkeypatch, LateDevice(3, longest=6))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x):
        return self.head(self.embed(x)) * self.factor


def train(left, before_backward=lambda model: None, factor=1.0):
    """The verdict over two batches of a model whose gradient of `head` is `left` at the start."""
    torch.manual_seed(0)
    model = Net()
    model.factor = factor
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.head.weight.grad[0, 0] = left
    handle = gpuwatch.watch(model, on_overflow="continue")
    try:
        for batch in range(3):
            loss = model(torch.ones(2, 4)).sum()
            if batch == 0:
                before_backward(model)
            loss.backward()
        return handle.verdict(), [event for event in handle.events if type(event).__name__ == "OwnFault"]
    finally:
        handle.remove()


def test_what_was_left_in_grad_is_not_of_that_backward():
    verdict, faults = train(math.nan)
    assert faults == []
    assert (verdict.module, verdict.phase, verdict.role, verdict.batch) == ("head", "backward", "grad weight", 0)
    assert "before the backward of batch 0 began" in verdict.statement
    assert "overflowed" not in verdict.statement
    assert "zero_grad()" in verdict.next[0]
    assert verdict.certainty == "established"


@pytest.mark.parametrize(
    ("left", "between"),
    [
        (math.nan, lambda model: model.zero_grad()),
        (math.nan, lambda model: model.zero_grad(set_to_none=False)),
        (1.0, lambda model: None),
    ],
    ids=["set to None", "set to zero", "finite"],
)
def test_what_was_cleared_or_finite_is_not_to_blame(left, between):
    assert train(left, between)[0].kind != "overflow"
    verdict, _ = train(left, between, factor=math.nan)
    assert "before the backward" not in verdict.statement


@pytest.mark.quick(9)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_each_bad_number_is_seen_in_each_dtype(dtype, bad):
    model = nn.Linear(4, 4, bias=False, dtype=dtype)
    model.weight.grad = torch.ones_like(model.weight)
    model.weight.grad[3, 3] = bad
    handle = gpuwatch.watch(model, on_overflow="continue")
    try:
        for _ in range(2):
            model(torch.ones(2, 4, dtype=dtype)).sum().backward()
        verdict = handle.verdict()
    finally:
        handle.remove()
    assert "before the backward of batch 0 began" in verdict.statement


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_what_cannot_be_read_is_left_alone(watch, dtype):
    """A complex gradient, and one without elements."""
    watched = watch()
    shape = (2, 2) if dtype.is_complex else (0, 2)
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(torch.ones(shape, dtype=dtype))
    model.weight.grad = torch.ones_like(model.weight)
    for _ in range(2):
        model(torch.ones(2, 2, dtype=dtype)).abs().sum().backward()
    assert (watched.anomalies, watched.faults) == ([], [])


class WithUnused(Net):
    """`unused` is called, and no gradient flows to it."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return super().forward(x) + self.unused(x).detach()


def test_a_gradient_that_no_backward_adds_to_is_told_too():
    """The optimizer gets it."""
    model = WithUnused()
    model.unused.weight.grad = torch.full((4, 4), math.nan)
    handle = gpuwatch.watch(model, on_overflow="continue")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        verdict = handle.verdict()
    finally:
        handle.remove()
    assert (verdict.module, verdict.role, verdict.batch) == ("unused", "grad weight", 0)
    assert "before the backward of batch 0 began" in verdict.statement
    assert "zero_grad()" in verdict.next[0]


def test_a_gradient_that_this_backward_makes_is_its_own():
    """The left gradients are finite; the loss's derivative is not."""

    class Root(nn.Module):
        def forward(self, x):
            return (x - x.detach()).sqrt()

    model = nn.Sequential(nn.Linear(4, 4), Root())
    model[0].weight.grad = torch.ones(4, 4)
    handle = gpuwatch.watch(model, on_overflow="continue")
    try:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        verdict = handle.verdict()
    finally:
        handle.remove()
    assert (verdict.module, verdict.phase) == ("1", "backward")
    assert "before the backward" not in verdict.statement
