"""Trainings without any module: tensors of the script's own, a formula, its backward and a step. One known cause each.

And losses of a model that a function of the script's has computed and returned, so that its variables are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .scripts import BAD, KnownCause, of_loss

Formula = Callable[[torch.Tensor, bool], torch.Tensor]
"""(weight [6, 3], whether it is the bad batch) -> loss"""


def plain(formula: Formula, steps: int = 5, lr: float = 1e-3) -> Callable[[], None]:
    """Trains one weight. The formula is a function that has returned when the backward begins."""

    def train() -> None:
        weight = torch.linspace(0.1, 1.0, 18).reshape(6, 3).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr)
        for n in range(steps):
            loss = formula(weight, n == BAD)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


def by_hand() -> None:
    """Without an optimizer, in the loop itself."""
    weight = torch.full((6, 3), 0.5, requires_grad=True)
    for n in range(5):
        p = torch.softmax(weight.sum(0) * (400.0 if n == BAD else 1.0) * torch.tensor([1.0, 0.0, 0.5]), 0)
        cost = -(torch.tensor([0.0, 1.0, 0.0]) * torch.log(p)).sum()
        cost.backward()
        with torch.no_grad():
            weight -= 1e-3 * weight.grad
        weight.grad = None


def factor(bad: bool, value: float = 0.0) -> float:
    return value if bad else 1.0


def sigmoid_of(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    """Both logs are of 0, at different elements."""
    p = torch.sigmoid(weight.sum(0) * torch.tensor([1.0, -1.0, 1.0]) * (1e4 if bad else 1.0))
    return -(torch.tensor([0.0, 1.0, 0.0]) * p.log() + torch.tensor([1.0, 0.0, 1.0]) * (1 - p).log()).mean()


def of_nll(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(weight, 1), torch.full((6,), -100 if bad else 1))


def split(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    mean, log_variance = (weight * torch.tensor([1.0, 200.0 if bad else 1.0, 1.0])).split([1, 2], 1)
    return mean.square().sum() + log_variance.exp().sum()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x / (x - x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def of_own_function(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    """What a function of the script's own computes is not known. Its log is of finite numbers."""
    return weight.log().sum() + (Square.apply(weight).sum() if bad else 0)


def of_constant(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    """A constant is nan before: neither the sqrt nor the sum has made it."""
    constant = torch.zeros(()).log() * 0 if bad else torch.zeros(())
    return (weight + constant).sqrt().sum()


def of_scaled_constant(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    return (weight.log() * (torch.zeros(()).log() if bad else 1)).sum()


def two_faults(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    return (weight * factor(bad)).log().sum() + (weight - 2 * bad).sqrt().sum()


def hidden(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    """The log of 0 is hidden, and a division by 0 makes the loss bad."""
    logs = torch.where(weight > 0.9, (weight - (0.5 if bad else -1)).log(), weight)
    return logs.sum() / (weight.detach() * factor(bad)).sum()


def checkpointed(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    return checkpoint(
        lambda x: (x * factor(bad)).log().exp() + (x * factor(bad)).log(), weight, use_reentrant=False
    ).sum()


def changed_in_place(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    """What the log was handed is overwritten. Its backward raises."""
    x = weight * 1
    y = x.log()
    if bad:
        x.mul_(0)
        return (y / x.detach()).sum()
    return y.sum()


def swept(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    return (weight * (1e30 if bad else 1)).square().sum()


def bad_before() -> None:
    """The script makes its weight nan between two batches."""
    weight = torch.full((6, 3), 0.5, requires_grad=True)
    for n in range(5):
        weight.grad = None
        weight.log().sum().backward()
        with torch.no_grad():
            weight -= weight.grad * (float("nan") if n == BAD else 1e-3)


def kl(out: torch.Tensor, n: int) -> torch.Tensor:
    p = F.softmax(out.flatten() * (1e4 if n == BAD else 1.0), 0)
    return (p * torch.log(p)).sum()


def quotient(out: torch.Tensor, n: int) -> torch.Tensor:
    weight = (-(out.square() + 1) * (1e5 if n == BAD else 1.0)).exp()
    return (weight / weight.sum(0) * out).mean()


def between(formula: Formula, change: Callable[[torch.Tensor, bool], None]) -> Callable[[], None]:
    """Changes the weight's gradient between backward and step. No derivative is to blame."""

    def train() -> None:
        weight = torch.linspace(0.1, 1.0, 18).reshape(6, 3).requires_grad_()
        optimizer = torch.optim.SGD([weight], 1e-3)
        for n in range(5):
            loss = formula(weight, False)
            optimizer.zero_grad()
            loss.backward()
            change(weight, n == BAD)
            optimizer.step()

    return train


def distance(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    return (weight * factor(bad)).square().sum(0).sqrt().sum()


def clipped(weight: torch.Tensor, bad: bool) -> None:
    assert weight.grad is not None
    weight.grad /= weight.grad.norm() * factor(bad)


def replaced(weight: torch.Tensor, bad: bool) -> None:
    assert weight.grad is not None
    weight.grad = weight.grad * factor(bad, float("nan"))


def hooked(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    if bad:
        weight.register_hook(lambda gradient: gradient * float("nan"))
    return distance(weight, False)


def with_own_function(weight: torch.Tensor, bad: bool) -> torch.Tensor:
    return distance(Poisoned.apply(weight, bad), False)


class Poisoned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bad: bool) -> torch.Tensor:
        ctx.bad = bad
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * factor(ctx.bad, float("nan")), None


def own(name: str, says: str, advises: str, formula: Formula) -> KnownCause:
    return KnownCause(name, "domain", says, advises, plain(formula))


PLAIN = [
    KnownCause("by hand, without an optimizer", "domain", "`log` of `p`: the log of 0", "add an eps", by_hand),
    own("log of 0", "`log`: the log of 0", "add an eps", lambda w, bad: (w * factor(bad)).log().sum()),
    own("log below 0", "a number below 0", "add an eps", lambda w, bad: (w * factor(bad, -1)).log().mean()),
    own("two logs", "`log`: the log of 0", "add an eps", sigmoid_of),
    own("0 / 0", "`div`: 0 / 0", "add an eps", lambda w, bad: (w * factor(bad) / (w * factor(bad)).sum()).sum()),
    own("1 / 0", "`reciprocal`", "add an eps", lambda w, bad: (1 / (w * factor(bad))).sum()),
    own("sqrt below 0", "the square root", "add an eps", lambda w, bad: (w * factor(bad, -1)).sqrt().sum()),
    own("a power", "a power that is not whole", "add an eps", lambda w, bad: (w * factor(bad, -1)).pow(1.5).sum()),
    own("acos beyond 1", "beyond 1 or -1", "clamp it", lambda w, bad: (w * (3.0 if bad else 0.5)).acos().sum()),
    own("std of one", "fewer than two", "correction=0", lambda w, bad: w[: 1 if bad else 6, 0].std(0) / 2),
    own("mean of nothing", "a mean over nothing", "count.clamp", lambda w, bad: w[w > (99 if bad else 0)].mean()),
    own("no label", "every target is ignored", "clamped to at least 1", of_nll),
    own("exp in a split", "`exp`: exp of a number that is too large", "bound", split),
    own("within a checkpoint", "`log`: the log of 0", "add an eps", checkpointed),
    own("a division beside a log that is hidden", "`div`: a division by 0", "add an eps", hidden),
]
"""The operation is proved: it has made the value of finite operands."""

RETURNED = [
    KnownCause("p log p of a model", "domain", "`log`: the log of 0", "add an eps", of_loss(kl)),
    KnownCause("0 / 0 of a model", "domain", "`div`: 0 / 0", "add an eps", of_loss(quotient)),
]
"""Of a model's finite outputs, in a function that has returned."""

UNPROVED = [
    KnownCause("a function of its own", "", "", "", plain(of_own_function)),
    KnownCause("a constant that is nan", "", "", "", plain(of_constant)),
    KnownCause("times a constant", "", "", "", plain(of_scaled_constant)),
    KnownCause("two faults", "", "", "", plain(two_faults)),
    KnownCause("a weight that was nan", "", "", "", bad_before),
]
"""No operation may be named. `says` and `advises` are not used."""

GRADIENTS = [
    own("sqrt at 0", "`sqrt` (at 0)", "Make what `sqrt` is handed safe", distance),
    own(
        "where around sqrt",
        "`sqrt` (at 0)",
        "Make what `sqrt` is handed safe",
        lambda w, bad: torch.where(w > 0.5, (w * factor(bad)).sqrt(), w).sum(),
    ),
    own("a root", "`pow` (at 0", "Make what `pow`", lambda w, bad: (w * factor(bad)).pow(0.5).sum()),
]
"""The loss is finite, and the gradient is not."""

CHANGED = [
    KnownCause("a clip by norm 0", "", "", "", between(distance, clipped)),
    KnownCause("a gradient that is replaced", "", "", "", between(distance, replaced)),
    KnownCause("a hook on the weight", "", "", "", plain(hooked)),
    KnownCause("a backward of its own", "", "", "", plain(with_own_function)),
]
"""No derivative is to blame, though `sqrt` is in the graph."""
