"""Small trainings with one known cause each, written for these tests alone: a model, its batches and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

BAD = 2
"""The batch in which it happens."""
Batches = Iterator[tuple[Any, ...]]


class KnownCause(NamedTuple):
    name: str
    kind: str
    """"" where nobody can know it."""
    says: str
    """A part of the cause's statement."""
    advises: str
    """A part of the first line of Next."""
    train: Callable[[], None]


class Own(nn.Module):
    """A module whose forward is a function of its input and of whether the batch is the bad one."""

    def __init__(self, function: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.calls = function, 0
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        return self.leave(self.function(self.enter(x), bad))


def run(
    net: nn.Module,
    batches: Callable[[int], tuple[Any, ...]],
    loss: Callable[[torch.Tensor, int], torch.Tensor] = lambda out, n: out.square().mean(),
    lr: float = 1e-3,
    steps: int = 5,
    between: Callable[[nn.Module, int], None] = lambda net, n: None,
) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr)
    for n in range(steps):
        made = loss(net(*batches(n)), n)
        optimizer.zero_grad()
        made.backward()
        between(net, n)
        optimizer.step()


def plain(n: int) -> tuple[Any, ...]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(n)),)


def flagged(n: int) -> tuple[Any, ...]:
    return (*plain(n), n == BAD)


def own(function: Callable[[torch.Tensor, bool], torch.Tensor], **options: Any) -> Callable[[], None]:
    return lambda: run(Own(function), flagged, **options)


def of_data(change: Callable[[torch.Tensor], None], function: Any = None) -> Callable[[], None]:
    """Trains on batches of which one is changed in place."""

    def batch(n: int) -> tuple[Any, ...]:
        (x,) = plain(n)
        if n == BAD:
            change(x)
        return (x,)

    return lambda: run(Own(function or (lambda h, bad: h.square())), batch)


def put(at: Any, value: float) -> Callable[[torch.Tensor], None]:
    def change(x: torch.Tensor) -> None:
        x[at] = value

    return change


def scaled(at: Any, factor: float) -> Callable[[torch.Tensor], None]:
    def change(x: torch.Tensor) -> None:
        x[at] *= factor

    return change


def of_loss(loss: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[], None]:
    return lambda: run(Own(lambda h, bad: h.tanh()), plain, loss)


def masked_mean(out: torch.Tensor, n: int) -> torch.Tensor:
    mask = torch.zeros(8, 1) if n == BAD else torch.ones(8, 1)
    return (out * mask).sum() / mask.sum()


def in_one_function() -> None:
    """A loop whose loss is computed where its backward is called."""
    net = Own(lambda h, bad: h.tanh())
    for n in range(5):
        mask = torch.zeros(8, 1) if n == BAD else torch.ones(8, 1)
        loss = (net(*plain(n)) * mask).sum() / mask.sum()
        loss.backward()


def with_rewards() -> None:
    net = Own(lambda h, bad: h.tanh())
    for n in range(5):
        reward = torch.ones(1) if n == BAD else torch.randn(8)
        reward = (reward - reward.mean()) / reward.std()
        loss = (net(*plain(n)) * reward.reshape(-1, 1)).mean()
        loss.backward()


def distance(out: torch.Tensor, n: int) -> torch.Tensor:
    other = out.detach() if n == BAD else torch.zeros_like(out)
    return (out - other).square().sum(1).sqrt().mean()


def entropy(out: torch.Tensor, n: int) -> torch.Tensor:
    p = out.sigmoid() * (0.0 if n == BAD else 1.0)
    return -(p * p.log()).mean()


def spoiled(net: nn.Module, n: int) -> None:
    if n == BAD - 1:
        with torch.no_grad():
            net.enter.weight[1, 1] = 1e25


HIDDEN = torch.zeros(8, 8)
HIDDEN[3] = float("-inf")


class Racing(Own):
    """Makes nan in its third call alone, whatever it is handed."""

    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, self.calls == BAD + 1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(x / x.norm(dim=1, keepdim=True))


class Running(nn.Module):
    """Divides by a running variance, which it then updates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.ones(6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out = self.scale * h / (self.running_var + 1e-5).sqrt()
        with torch.no_grad():
            self.running_var.lerp_(h.var(0), 0.1)
        return out


def with_running(rows: Callable[[int], int], between: Callable[[nn.Module, int], None] = lambda net, n: None) -> None:
    """Trains with batches of so many rows."""
    net = nn.Sequential(nn.Linear(6, 6), Running(), nn.Linear(6, 1))
    run(net, lambda n: (plain(n)[0][: rows(n)],), between=between)


def by_hand(h: torch.Tensor, bad: bool) -> torch.Tensor:
    scores = h @ h.T + (HIDDEN if bad else 0)
    scores = scores - scores.amax(-1, keepdim=True)
    return (scores - scores.exp().sum(-1, keepdim=True).log()).exp() @ h


def as_penalty(h: torch.Tensor, bad: bool) -> torch.Tensor:
    return h + (h @ h.T + (HIDDEN if bad else 0)).logsumexp(-1, keepdim=True) * 0


def zero_row(n: int) -> tuple[Any, ...]:
    (x,) = plain(n)
    x[4] *= n != BAD
    return (x,)


CAUSES = [
    # samples that stand out
    KnownCause("one sample of 1e30", "data", "row 3 of 8", "row 3 of 8", of_data(scaled(3, 1e30))),
    KnownCause("two samples of 1e25", "data", "rows 1 and 6 of 8", "rows 1 and 6", of_data(scaled([1, 6], 1e25))),
    KnownCause("one number of 1e22", "data", "row 5 of 8", "row 5", of_data(put((5, 2), 1e22))),
    KnownCause("an outlier under exp", "data", "row 2 of 8", "row 2", of_data(scaled(2, 1e4), lambda h, bad: h.exp())),
    KnownCause(
        "an outlier in float16",
        "data",
        "row 7 of 8",
        "row 7",
        of_data(scaled(7, 1e4), lambda h, bad: (h.half() * 30).float()),
    ),
    KnownCause("nan in the batch", "data", "holds nan", "data loader", of_data(put((4, 1), float("nan")))),
    KnownCause("inf in the batch", "data", "holds +inf", "data loader", of_data(put((0, 0), float("inf")))),
    # outside of a domain
    KnownCause(
        "log of 0",
        "domain",
        "`log`: the log of 0",
        "add an eps",
        own(lambda h, bad: (h.abs() * (not bad)).log()),
    ),
    KnownCause(
        "log below 0",
        "domain",
        "a number below 0",
        "clamp it",
        own(lambda h, bad: (-h.abs() if bad else h.abs()).log()),
    ),
    KnownCause(
        "exp of 100, which float64 holds",
        "domain",
        "exp of a number that is too large",
        "bound what it is handed",
        own(lambda h, bad: (h.tanh() * (1e-3 if not bad else 0) + 100 * bad).exp()),
    ),
    KnownCause("sqrt below 0", "domain", "the square root", "clamp it", own(lambda h, bad: (h.abs() - 9 * bad).sqrt())),
    KnownCause(
        "0 / 0",
        "domain",
        "0 / 0 (first element: 0, 0 in)",
        "eps",
        own(lambda h, bad: (h * (not bad)) / (h * (not bad)).norm()),
    ),
    KnownCause("1 / 0", "domain", "a division by 0", "eps", own(lambda h, bad: 1 / (h.abs() * (not bad)))),
    KnownCause(
        "std of one", "domain", "fewer than two", "correction=0", own(lambda h, bad: h / h[: 1 if bad else 8].std(0))
    ),
    KnownCause(
        "mean of nothing",
        "domain",
        "a mean over nothing",
        "count.clamp",
        own(lambda h, bad: h + h[h > (99 if bad else -99)].mean()),
    ),
    KnownCause(
        "no label",
        "domain",
        "every target is ignored",
        "clamped to at least 1",
        own(lambda h, bad: h + F.cross_entropy(h, torch.full((8,), -100 if bad else 1))),
    ),
    KnownCause("0 ** -0.5", "domain", "0 to a power below 0", "eps", own(lambda h, bad: (h.abs() * (not bad)) ** -0.5)),
    KnownCause(
        "acos beyond 1",
        "domain",
        "beyond 1 or -1",
        "clamp it",
        own(lambda h, bad: (h.tanh() * (3 if bad else 0.5)).acos()),
    ),
    KnownCause(
        "exp of 1e4", "domain", "exp of a number", "bound", own(lambda h, bad: (h.abs() + (1e4 if bad else 0)).exp())
    ),
    KnownCause("a zero row", "domain", "row 4 of 8", "eps", lambda: run(Normed(), zero_row)),
    # too large for the dtype
    KnownCause(
        "float16 sum",
        "precision",
        "float32 abs max",
        "Compute this part in",
        own(lambda h, bad: ((h.half().abs() + 300 * bad) @ (h.half().abs().T + 300 * bad)).float() @ h),
    ),
    KnownCause(
        "float16 conversion",
        "precision",
        "the conversion to float16",
        "Compute this part in",
        own(lambda h, bad: (h + 1e6 * bad).half().float()),
    ),
    KnownCause(
        "float16 product",
        "precision",
        "too large for float16",
        "Compute this part in",
        own(lambda h, bad: ((h.half() + 3e4 * bad) * 3).float()),
    ),
    # masks
    KnownCause(
        "a closed row",
        "mask",
        "-inf",
        "keep one position open",
        own(lambda h, bad: ((h @ h.T) + (HIDDEN if bad else 0)).softmax(-1) @ h),
    ),
    KnownCause("a softmax by hand of a closed row", "mask", "`sub` was handed -inf and -inf", "keep one", own(by_hand)),
    KnownCause("a product with 0", "mask", "`mul` was handed -inf and 0", "torch.where", own(as_penalty)),
    # buffers
    KnownCause(
        "a running variance of one row",
        "data",
        "in batch 2 of rank 0 the module had one number a channel: input[0] was [1, 6], and [8, 6] in the call before",
        "drop_last",
        lambda: with_running(lambda n: 1 if n == BAD else 8),
    ),
    KnownCause(
        "a running variance of one row, read before the forward",
        "data",
        "in batch 1 of rank 0 the module had one number a channel",
        "drop_last",
        lambda: with_running(lambda n: 1 if n == 1 else 8),
    ),
    # the script
    KnownCause("an empty mask", "domain", "`div`: 0 / 0 (first element: 0, 0 in)", "eps", in_one_function),
    KnownCause("rewards of one sample", "domain", "variable `reward`", "`std`", with_rewards),
    KnownCause(
        "an empty mask in a function", "domain", "`div`: 0 / 0 (first element: 0, 0 in)", "eps", of_loss(masked_mean)
    ),
    KnownCause("p log p at 0", "domain", "`log`: the log of 0", "eps", of_loss(entropy)),
    KnownCause("a distance of 0", "domain", "`sqrt` (at 0)", "`sqrt`", of_loss(distance)),
    KnownCause(
        "where around sqrt",
        "domain",
        "`sqrt` (at 0)",
        "`sqrt`",
        own(lambda h, bad: torch.where(h > 0, h.abs().mul(0.0 if bad else 1.0).sqrt(), h)),
    ),
    # one weight made large
    KnownCause(
        "a weight of 1e25",
        "step",
        "weight of `enter`",
        "large",
        lambda: run(Own(lambda h, bad: h.square()), plain, between=spoiled),
    ),
    # not the same the second time
    KnownCause(
        "another number the second time",
        "unrepeatable",
        "finite the second time",
        "second call",
        lambda: run(Racing(lambda h, bad: h * (float("nan") if bad else 1)), plain),
    ),
    # what nobody can know
    KnownCause("a whole batch of 1e30", "", "", "", of_data(scaled(slice(None), 1e30))),
]
