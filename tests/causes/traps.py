"""Trainings that look like a cause that they do not have: each has led to a wrong one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from .scripts import BAD, KnownCause, Own, flagged, plain, run, with_running


def with_odd_row(n: int) -> tuple[Any, ...]:
    """Row 3 is sixty times larger, in every batch."""
    (x,) = plain(n)
    x[3] *= 60
    return (x,)


def padded(n: int) -> tuple[Any, ...]:
    """Row 7 is all zero, in every batch."""
    (x,) = plain(n)
    x[7] = 0
    return (x,)


def times(factor: float, at: int | None = None) -> Any:
    def between(net: nn.Module, n: int) -> None:
        if at is None or n == at:
            with torch.no_grad():
                net.enter.weight.mul_(factor)

    return between


def halves(h: torch.Tensor, bad: bool) -> torch.Tensor:
    return h.half().float()


class Counting(Own):
    """Overflows in its third and fourth calls, whatever it is handed."""

    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, self.calls in (BAD + 1, BAD + 2))


class Multiplied(Own):
    """What it computes depends on the step, which it is told of by a buffer."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        return super().forward(x, bool(self.step >= BAD))


def without_variance(net: nn.Module, n: int) -> None:
    if n == BAD:
        net[1].running_var.fill_(math.nan)


class Pictures(nn.Module):
    """Has a running variance of pictures: of one, too, it is one of many numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.ones(3))
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.scale * x / (self.running_var[:, None, None] + 1e-5).sqrt()
        with torch.no_grad():
            self.running_var.lerp_(x.var((0, 2, 3)), 0.1)
        return out


def spoiled_pictures() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1), Pictures())
    run(net, lambda n: (torch.randn(1 if n == BAD else 4, 3, 2, 2),), between=without_variance)


def counted(net: nn.Module, n: int) -> None:
    net.step += 1


class Scaled(nn.Module):
    """Has scales of its features as an argument, of which one is large: they are no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return self.leave((self.enter(x) * 20 * scales).half().float())


class Divides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return self.enter(x) / by


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient - gradient)


class Filled(nn.Module):
    """Holds a very large number that it uses elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 1)
        self.fill = nn.Parameter(torch.full((1,), -1e30), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.enter(x).square()


def clipped_by_hand() -> None:
    """Gradients become nan by a clip of norm 0; a variable of another use is nan all along."""
    net = Own(lambda h, bad: h * (0.0 if bad else 1.0))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for n in range(5):
        overlap = torch.tensor([1.0, 0.0]) / torch.tensor([2.0, 0.0])
        assert overlap.nanmean() == 0.5
        loss = (net(*plain(n)) * (n != BAD)).sum()
        optimizer.zero_grad()
        loss.backward()
        for parameter in net.parameters():
            parameter.grad /= parameter.grad.norm()
        optimizer.step()


def in_a_branch() -> None:
    """The loss is made nan in a branch; the line of the other one must not be named."""
    net = Own(lambda h, bad: h.tanh())
    for n in range(5):
        out = net(*plain(n))
        if n == BAD:
            factor = (torch.zeros(1).log() * 0).sum()
            loss = out.square().mean() * factor
        else:
            loss = out.square().mean()
        loss.backward()


def added_to() -> None:
    net = Own(lambda h, bad: h.tanh())
    for n in range(5):
        loss = net(*plain(n)).square().mean()
        loss *= torch.zeros(()).log() * 0 if n == BAD else 1
        loss.backward()


def from_the_batch_before() -> None:
    """What is nan was assigned below, in the batch before; the line above the loop must not be named."""
    net = Own(lambda h, bad: h.tanh())
    factor = torch.ones(())
    for n in range(5):
        loss = net(*plain(n)).square().mean() * factor
        loss.backward()
        factor = torch.zeros(()).log() * 0 if n == BAD else torch.ones(())


def diverging() -> None:
    """A plain regression at a learning rate that is far too high: its loss is inf because its outputs are huge."""
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), 30.0)
    for n in range(60):
        out = net(*plain(n))
        loss = (out - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def clipped_by_inf() -> None:
    """The gradients become large, and their norm inf. A clip to at most inf makes nan of them."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(net.parameters(), 3.0)
    for n in range(60):
        optimizer.zero_grad()
        (net(*plain(n)) - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), math.inf)
        optimizer.step()


class Bounds(nn.Module):
    """A gate that is finite for an input of inf; its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.enter(x).nan_to_num().tanh())


def with_inf(n: int) -> tuple[Any, ...]:
    (x,) = plain(n)
    x[2, 3] = float("inf") if n == BAD else x[2, 3]
    return (x,)


def of_large_weights() -> None:
    net = Own(lambda h, bad: h**3)
    with torch.no_grad():
        net.enter.weight.normal_(std=1e15)
    run(net, plain)


TRAPS = [
    KnownCause(
        "a log of 0 in the first batch",
        "domain",
        "`log`: the log of 0",
        "add an eps",
        lambda: run(Own(lambda h, bad: (h.abs() * (not bad)).log()), lambda n: (*plain(n), n == 0)),
    ),
    KnownCause(
        "a float16 quotient",
        "precision",
        "too large for float16",
        "Compute this part in",
        lambda: run(Own(lambda h, bad: (h.sign().half() / (1e-5 if bad else 1)).float()), flagged),
    ),
    KnownCause("a gate that bounds inf", "data", "holds +inf", "data loader", lambda: run(Bounds(), with_inf)),
    KnownCause(
        "a product of large weights",
        "start",
        "no optimizer step was seen before it",
        "initialisation",
        of_large_weights,
    ),
    KnownCause(
        "float16 and a training that diverges",
        "precision",
        "in batches 0 to",
        "Compute this part in",
        lambda: run(Own(lambda h, bad: halves(h * 300, bad)), plain, lr=0.3, steps=40),
    ),
    KnownCause(
        "an odd row always, and a weight made large",
        "step",
        "weight of `enter`",
        "large",
        lambda: run(Own(halves), with_odd_row, between=times(1e9, BAD)),
    ),
    KnownCause(
        "an odd row always, in float16",
        "precision",
        "the conversion to float16",
        "Compute this part in",
        lambda: run(Multiplied(lambda h, bad: halves(h * (4e3 if bad else 1), bad)), with_odd_row, between=counted),
    ),
    KnownCause(
        "state of its own", "", "", "", lambda: run(Counting(lambda h, bad: h * (1e39 if bad else 1)), with_odd_row)
    ),
    KnownCause(
        "scales of features",
        "precision",
        "the conversion to float16",
        "Compute this part in",
        lambda: run(Scaled(), lambda n: (torch.randn(8, 6), torch.tensor([1.0, 1, 1, 1, 1, 1e4 if n == BAD else 1]))),
    ),
    KnownCause(
        "a padding row beside 1 / 0",
        "domain",
        "`div`: a division by 0",
        "eps",
        lambda: run(Divides(), lambda n: (*padded(n), torch.tensor(0.0 if n == BAD else 1.0))),
    ),
    KnownCause(
        "a backward of its own",
        "domain",
        "a division by 0",
        "Look at what makes the operands of `div`",
        lambda: run(Own(lambda h, bad: (1 + OwnBackward.apply(h).square()).sqrt()), plain),
    ),
    KnownCause("a fill that is not used", "", "", "", lambda: run(Filled(), lambda n: (plain(n)[0] * 1e25,))),
    KnownCause("a clip by norm 0", "", "", "", clipped_by_hand),
    KnownCause("a loss in a branch", "script", "variable `loss` of `in_a_branch` is nan", "`loss`", in_a_branch),
    KnownCause("a loss that is added to", "script", "variable `loss` of `added_to` is nan", "`loss`", added_to),
    KnownCause(
        "of the batch before",
        "script",
        "variable `factor` of `from_the_batch_before` is nan; so is `loss`",
        "`factor`",
        from_the_batch_before,
    ),
    KnownCause("a loss of huge outputs", "divergence", "the training diverged", "Lower the learning rate", diverging),
    KnownCause(
        "a clip of huge gradients", "divergence", "the training diverged", "Lower the learning rate", clipped_by_inf
    ),
    KnownCause(
        "a running variance that the script spoils", "", "", "", lambda: with_running(lambda n: 8, without_variance)
    ),
    KnownCause("batches of one row, and a variance that the script spoils", "", "", "", spoiled_pictures),
]
