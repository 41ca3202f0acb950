"""Trainings with a known cause, drawn by a seed: a net, a place in it, and a fault that is put there.

They know nothing of what decides. `python -m gpuwatch.tests.causes.benchmark` counts what is said of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 8
Site = Callable[[torch.Tensor, bool], torch.Tensor]


@dataclass
class DrawnCause:
    """`kinds`: each that a careful person could name, the best one first; "" where nobody can know."""

    name: str
    kinds: tuple[str, ...]
    train: Callable[[], None]
    says: str = ""
    """A part of the cause's statement: the sample."""
    is_between_two: bool = field(default=False)
    """Two faults are there at once, and no trial decides between them: neither can be established."""


class Placed(nn.Module):
    """A net with a function in its middle. `bad` is an argument, so that a second run is handed it, too."""

    def __init__(self, kind: str, site: Site) -> None:
        super().__init__()
        self.kind, self.site = kind, site
        self.enter: nn.Module = {
            "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
            "conv": lambda: nn.Conv1d(1, 2, 3, padding=1),
            "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
            "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
        }[kind]()
        self.leave = nn.Linear(2 * WIDTH if kind == "conv" else WIDTH, 1)

    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        if self.kind == "conv":
            h = self.enter(x.unsqueeze(1)).flatten(1)
        elif self.kind == "encoder":
            h = self.enter(torch.stack([x, x.flip(1)], 1)).mean(1)
        elif self.kind == "lstm":
            h = self.enter(torch.stack([x, x.flip(1)], 1))[0][:, -1]
        else:
            h = self.enter(x)
        return self.leave(self.site(h, bad))


Loss = Callable[[torch.Tensor, int], torch.Tensor]


def squares(out: torch.Tensor, n: int) -> torch.Tensor:
    return (out - 1).square().mean()


def fit(
    net: nn.Module,
    batch: Callable[[int], tuple[Any, ...]],
    loss: Loss = squares,
    optimizer: str = "SGD",
    lr: float = 1e-3,
    steps: int = 8,
    between: Callable[[nn.Module, torch.optim.Optimizer, int], None] = lambda net, optimizer, n: None,
) -> None:
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=lr)
    for n in range(steps):
        made.zero_grad()
        loss(net(*batch(n)), n).backward()
        between(net, made, n)
        made.step()


class Case:
    """What is drawn for one training before its fault is."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.net = draw.choice(["mlp", "conv", "encoder", "lstm", "linear"])
        self.rows = draw.choice([4, 8, 16, 24])
        self.bad = draw.choice([0, 1, 3, 5])
        self.seed = draw.randrange(10**6)

    def __str__(self) -> str:
        return f"{self.net}, {self.rows} rows, batch {self.bad}"

    def plain(self, n: int) -> torch.Tensor:
        return torch.randn(self.rows, WIDTH, generator=torch.Generator().manual_seed(self.seed + n))

    def flagged(self, n: int) -> tuple[Any, ...]:
        return self.plain(n), n == self.bad

    def own(self, site: Site, **options: Any) -> Callable[[], None]:
        return lambda: fit(Placed(self.net, site), self.flagged, **options)

    def changed(self, change: Callable[[torch.Tensor], None], site: Site) -> Callable[[], None]:
        def batch(n: int) -> tuple[Any, ...]:
            x = self.plain(n)
            if n == self.bad:
                change(x)
            return (x,)

        return lambda: fit(Placed(self.net, site), batch)


# A sample of the data


class Rows(Dataset[Any]):
    def __init__(self, bad: int, value: float, as_dict: bool) -> None:
        self.bad, self.value, self.as_dict = bad, value, as_dict

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        row = row * self.value if index == self.bad else row
        return {"x": row} if self.as_dict else row


def an_outlier(case: Case) -> DrawnCause:
    """Nets with a norm or a gate bound what they hand on: those take their outlier to the place itself."""
    case.net = case.draw.choice(["conv", "linear"])
    row = case.draw.randrange(case.rows)
    name, site, factor = case.draw.choice(
        [
            ("square", lambda h, bad: h.square(), 1e25),
            ("cube", lambda h, bad: h**3, 1e18),
            ("exp", lambda h, bad: h.exp(), 1e5),
            ("half", lambda h, bad: h.half().float(), 1e7),
            ("cosh", lambda h, bad: h.cosh(), 1e4),
            ("product", lambda h, bad: h * h * h, 1e15),
            ("half product", lambda h, bad: (h.half() * h.half()).float(), 3e3),
        ]
    )

    def change(x: torch.Tensor) -> None:
        x[row] *= factor

    train = case.changed(change, site)
    return DrawnCause(f"row {row} times {factor:g} under {name}: {case}", ("data",), train, f"row {row} of {case.rows}")


def of_a_loader(case: Case) -> DrawnCause:
    index, as_dict = case.draw.randrange(64), case.draw.random() < 0.5
    workers, shuffle = case.draw.choice([0, 0, 0, 2]), case.draw.random() < 0.7

    def train() -> None:
        net, generator = Placed("linear", lambda h, bad: h.square()), torch.Generator().manual_seed(case.seed)
        loader = DataLoader(Rows(index, 1e30, as_dict), 8, shuffle, num_workers=workers, generator=generator)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for batch in loader:
            optimizer.zero_grad()
            squares(net(batch["x"] if as_dict else batch), 0).backward()
            optimizer.step()

    name = f"index {index} of a loader, {workers} workers, {'dicts' if as_dict else 'rows'}, shuffle {shuffle}"
    return DrawnCause(name, ("data",), train, f"(index {index} of data set ")


def not_finite(case: Case) -> DrawnCause:
    row, value = case.draw.randrange(case.rows), case.draw.choice([float("nan"), float("inf"), float("-inf")])

    def change(x: torch.Tensor) -> None:
        x[row, case.draw.randrange(WIDTH)] = value

    train = case.changed(change, lambda h, bad: h)
    kinds = ("data", "mask") if value == float("-inf") else ("data",)  # of which -inf may be a part
    return DrawnCause(f"{value} in row {row}: {case}", kinds, train, f"at [{row}, ")


# Numbers that 16 bits do not hold


def in_half(case: Case) -> DrawnCause:
    name, site = case.draw.choice(
        [
            ("conversion", lambda h, bad: (h * (1e8 if bad else 1)).half().float()),
            ("product", lambda h, bad: (h.half() * (6e4 if bad else 1) * (50 if bad else 1)).float()),
            ("square", lambda h, bad: ((h.abs() + 0.1).half() * (5e3 if bad else 1)).square().float()),
            ("matmul", lambda h, bad: ((h.abs() + 900 * bad).half() @ (h.abs() + 900 * bad).half().T).float() @ h),
            ("sum", lambda h, bad: h + (h.abs() + 3e4 * bad).half().sum(1, keepdim=True).float()),
            ("exp", lambda h, bad: (h.tanh() + 13 * bad).half().exp().float()),
            ("division", lambda h, bad: (h.sign().half() / (1e-5 if bad else 1)).float()),
            ("cumsum", lambda h, bad: (h.abs() + 2e4 * bad).half().cumsum(1).float()),
            ("einsum", lambda h, bad: torch.einsum("bi,bj->bi", *2 * [(h.abs() + 200 * bad).half()]).float()),
        ]
    )
    return DrawnCause(f"float16 {name}: {case}", ("precision",), case.own(site))


# What no dtype mends


def outside(case: Case) -> DrawnCause:
    on = lambda h, bad: h * (not bad)  # noqa: E731  zero in the bad batch
    name, site = case.draw.choice(
        [
            ("log", lambda h, bad: (h.square() + 1e-3 * (not bad)).mul(not bad).log()),
            ("log10", lambda h, bad: (h.abs() + 1e-3).mul(not bad).log10()),
            ("log1p", lambda h, bad: (h.tanh() * 0.5 - 1.5 * bad).log1p()),
            ("sqrt", lambda h, bad: (h.square() + 0.1 - 99 * bad).sqrt()),
            ("rsqrt", lambda h, bad: (h.square() + 0.1).mul(not bad).rsqrt()),
            ("reciprocal", lambda h, bad: (h.square() + 0.1).mul(not bad).reciprocal()),
            ("own norm", lambda h, bad: on(h, bad) / on(h, bad).norm(dim=1, keepdim=True)),
            ("own standardisation", lambda h, bad: (h - h) / (h * (not bad)).std(1, correction=1, keepdim=True)),
            ("division", lambda h, bad: h / (h.square() + 0.1).mul(not bad)),
            ("asin", lambda h, bad: (h.tanh() * (1.5 if bad else 0.5)).asin()),
            ("acosh", lambda h, bad: (h.square() + (0 if bad else 1.1)).acosh()),
            ("atanh", lambda h, bad: (h.tanh() * 0.5 + bad).atanh()),
            ("power", lambda h, bad: (-h.abs() - 0.1 if bad else h.abs() + 0.1) ** 0.5),
            ("std", lambda h, bad: h + h[: 1 if bad else 4].std(0)),
            ("mean of nothing", lambda h, bad: h + h[h.abs() > (1e9 if bad else -1)].mean()),
            ("no label", lambda h, bad: h + F.cross_entropy(h, torch.full((len(h),), -100 if bad else 0))),
            ("logit", lambda h, bad: (h.sigmoid() * (not bad)).logit()),
            ("entropy", lambda h, bad: h - (on(h.softmax(1), bad).log() * on(h.softmax(1), bad))),
            ("cosine by hand", lambda h, bad: h * (on(h, bad).sum(1, keepdim=True) / on(h, bad).abs().sum(1)[:, None])),
            ("lgamma", lambda h, bad: (h.abs() + 0.5).mul(not bad).lgamma()),
        ]
    )
    return DrawnCause(f"{name}: {case}", ("domain", "script"), case.own(site))


def of_a_loss(case: Case) -> DrawnCause:
    bad = case.bad

    def masked(out: torch.Tensor, n: int) -> torch.Tensor:
        mask = torch.full_like(out, float(n != bad))
        return (out * mask).sum() / mask.sum()

    def likelihood(out: torch.Tensor, n: int) -> torch.Tensor:
        return -(out.sigmoid() * (n != bad)).log().mean()

    def contrast(out: torch.Tensor, n: int) -> torch.Tensor:
        return out.mean() / (out - (out if n == bad else 0)).norm()

    def kl(out: torch.Tensor, n: int) -> torch.Tensor:
        p = out.softmax(0) * (n != bad)
        return (p * (p / p.sum()).log()).sum()

    name, loss = case.draw.choice(list({"masked": masked, "nll": likelihood, "norm": contrast, "kl": kl}.items()))
    train = lambda: fit(Placed(case.net, lambda h, bad: h), case.flagged, loss)  # noqa: E731
    return DrawnCause(f"loss {name}: {case}", ("script", "domain"), train)


# Masks


def closed(case: Case) -> DrawnCause:
    row = case.draw.randrange(4)

    def added(h: torch.Tensor, bad: bool) -> torch.Tensor:
        mask = torch.zeros(len(h), len(h))
        if bad:
            mask[row] = float("-inf")
        return ((h @ h.T) + mask).softmax(-1) @ h

    def filled(h: torch.Tensor, bad: bool) -> torch.Tensor:
        is_open = torch.ones(len(h), len(h), dtype=torch.bool)
        is_open[row] = not bad
        return (h @ h.T).masked_fill(~is_open, float("-inf")).log_softmax(-1).exp() @ h

    def pooled(h: torch.Tensor, bad: bool) -> torch.Tensor:
        keep = torch.ones(len(h), dtype=torch.bool) if not bad else torch.zeros(len(h), dtype=torch.bool)
        weights = torch.where(keep, h.sum(1), torch.tensor(float("-inf"))).softmax(0)
        return h * weights[:, None]

    name, site = case.draw.choice([("added", added), ("filled", filled), ("pooled", pooled)])
    return DrawnCause(f"closed row, {name}: {case}", ("mask", "domain"), case.own(site))


# The training itself


def diverges(case: Case) -> DrawnCause:
    optimizer, lr = case.draw.choice([("SGD", 5.0), ("SGD", 30.0), ("SGD", 100.0)])
    site = case.draw.choice([lambda h, bad: h, lambda h, bad: h.square(), lambda h, bad: h * h.mean()])
    case.net = case.draw.choice(["mlp", "conv", "linear"])
    train = lambda: fit(  # noqa: E731
        Placed(case.net, site), lambda n: (case.plain(n),), optimizer=optimizer, lr=lr, steps=200
    )
    return DrawnCause(f"{optimizer} at {lr}: {case}", ("divergence", "step"), train)


def one_step(case: Case) -> DrawnCause:
    case.bad = case.draw.choice([2, 3, 4])
    case.net = case.draw.choice(["conv", "linear"])
    how = case.draw.choice(["loss", "rate", "script"])

    def loss(out: torch.Tensor, n: int) -> torch.Tensor:
        return squares(out, n) * (1e18 if how == "loss" and n == case.bad else 1)

    def between(net: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e18 if how == "rate" and n == case.bad else 1e-2
        if how == "script" and n == case.bad:
            with torch.no_grad():
                next(iter(net.enter.parameters())).mul_(1e20)

    train = lambda: fit(  # noqa: E731
        Placed(case.net, lambda h, bad: h**3), lambda n: (case.plain(n),), loss, lr=1e-2, between=between
    )
    return DrawnCause(f"one step by {how}: {case}", ("step",), train)


def at_the_start(case: Case) -> DrawnCause:
    size = case.draw.choice([1e15, 1e20, 1e25])
    case.net = case.draw.choice(["linear", "conv"])

    def train() -> None:
        net = Placed(case.net, lambda h, bad: h**3)
        with torch.no_grad():
            next(net.enter.parameters()).normal_(std=size)
        fit(net, lambda n: (case.plain(n),))

    return DrawnCause(f"weights of {size:g}: {case}", ("start",), train)


def of_a_hook(case: Case) -> DrawnCause:
    how = case.draw.choice(["hook", "clip"])

    def train() -> None:
        net = Placed(case.net, lambda h, bad: h)
        calls = [0]
        if how == "hook":

            def spoils(gradient: torch.Tensor) -> torch.Tensor:
                calls[0] += 1
                return gradient / (0.0 if calls[0] == case.bad + 1 else 1.0)

            net.leave.weight.register_hook(spoils)

        def between(net: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
            if how == "clip":
                for parameter in net.parameters():
                    parameter.grad.mul_(float("inf") if n == case.bad else 1.0)

        fit(net, lambda n: (case.plain(n),), between=between)

    return DrawnCause(f"gradients by {how}: {case}", ("hook", "script", ""), train)


class Counting(nn.Module):
    """Adds inf in one of its calls, whatever it is handed."""

    def __init__(self, at: int, value: float) -> None:
        super().__init__()
        self.at, self.value, self.calls = at, value, 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return h + (self.value if self.calls == self.at + 1 else 0.0)


def not_again(case: Case) -> DrawnCause:
    def train() -> None:
        counting = Counting(case.bad, case.draw.choice([float("inf"), float("nan")]))
        net = Placed(case.net, lambda h, bad: counting(h))
        net.counting = counting
        fit(net, lambda n: (case.plain(n),))

    return DrawnCause(f"a counter: {case}", ("unrepeatable", ""), train)


# What nobody can know


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, bad: bool) -> torch.Tensor:
        ctx.bad = bad
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * (float("nan") if ctx.bad else 1.0), None


def elsewhere(h: torch.Tensor, bad: bool) -> torch.Tensor:
    """Another library computes it."""
    made = np.exp(h.detach().double().numpy() * (1e4 if bad else 1e-3))
    with np.errstate(all="ignore"):
        return h + torch.from_numpy(made.astype(np.float32))


def unknown(case: Case) -> DrawnCause:
    name, train = case.draw.choice(
        [
            ("a backward of its own", case.own(lambda h, bad: (1 + OwnBackward.apply(h, bad).square()).sqrt())),
            ("numpy", case.own(elsewhere)),
            ("a constant", case.own(lambda h, bad: h + (float("inf") if bad else 0))),
            ("a constant factor", case.own(lambda h, bad: h * (float("nan") if bad else 1))),
        ]
    )
    return DrawnCause(f"{name}: {case}", ("",), train)


# Two at once


def two_at_once(case: Case) -> DrawnCause:
    row = case.draw.randrange(case.rows)
    case.net = case.draw.choice(["linear", "conv"])
    case.bad = max(case.bad, 3)
    how = case.draw.choice(["a row and a factor", "a step and float16", "a rate and a row"])

    def batch(n: int) -> tuple[Any, ...]:
        x = case.plain(n)
        if n == case.bad and how != "a step and float16":
            x[row] *= 1e3
        return x, n == case.bad

    def between(net: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
        if how == "a step and float16" and n == case.bad - 1:
            with torch.no_grad():
                next(net.enter.parameters()).mul_(3e5)

    site = {
        "a row and a factor": lambda h, bad: (h * (3e3 if bad else 1)).half().float(),
        "a step and float16": lambda h, bad: h.half().float(),
        "a rate and a row": lambda h, bad: h.half().float() ** 2,
    }[how]
    kinds = {
        "a row and a factor": ("data", "precision", ""),
        "a step and float16": ("step", "precision", "divergence"),
        "a rate and a row": ("divergence", "data", "step", "precision", ""),
    }[how]
    train = lambda: fit(  # noqa: E731
        Placed(case.net, site), batch, lr=3.0 if how == "a rate and a row" else 1e-3, between=between, steps=40
    )
    # that it is finite without the row is a proof, too
    return DrawnCause(f"{how}: {case}", kinds, train, is_between_two=how != "a row and a factor")


FAMILIES: dict[Callable[[Case], DrawnCause], int] = {
    an_outlier: 14,
    of_a_loader: 10,
    not_finite: 6,
    in_half: 20,
    outside: 20,
    of_a_loss: 8,
    closed: 9,
    diverges: 9,
    one_step: 6,
    at_the_start: 4,
    of_a_hook: 2,
    not_again: 4,
    two_at_once: 20,
    unknown: 18,
}
"""How many of each family a hundred and fifty have."""


def drawn(seed: int, scale: float = 1.0) -> list[DrawnCause]:
    """A hundred and fifty trainings, or a part of them: at least one of each family."""
    draw = random.Random(seed)
    return [family(Case(draw)) for family, number in FAMILIES.items() for _ in range(max(1, round(number * scale)))]
