"""How early the forecast says that a module will overflow, and how often it says so of healthy training.

    python benchmarks/forecast.py [--only NAME] [--seed N] [--every N] [--batches N]

Ten small models are trained until an output is inf, each made to grow in another way; ten others train well. What their
modules return goes through what a node agent does with it, batch by batch. Everything is float16 under autocast on the
CPU; in the healthy ones, outputs that stay in float32 are judged as if they were float16, too.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from gpuwatch.core.values import DTYPE_CODES
from gpuwatch.launcher.agent.batch_history import EVERY_BATCH, thinned
from gpuwatch.launcher.agent.forecast import LimitCrossing, RootForecasts
from torch import Tensor, nn

WIDTH = 32
Step = Callable[[int], None]
"""Trains one batch, which it is given the number of."""


class Seen(NamedTuple):
    """One batch, as a rank's history keeps it."""

    batch: int
    step: int
    columns: numpy.ndarray
    codes: numpy.ndarray


class Recorder:
    """What each module returned in a batch, by hooks."""

    def __init__(self, model: nn.Module, *, as_float16: bool) -> None:
        self.names: list[str] = []
        self.dtypes: dict[int, int] = {}
        self._as_float16 = as_float16
        self._largest: dict[int, float] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(len(self.names)))
            self.names.append(name or "(root)")

    def _hook(self, column: int) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                largest = output.detach().abs().max().item()
                known = self._largest.get(column, 0.0)
                self._largest[column] = largest if largest > known or math.isnan(largest) else known
                dtype = "float16" if self._as_float16 else str(output.dtype).removeprefix("torch.")
                self.dtypes[column] = DTYPE_CODES[dtype]

        return hook

    def batch(self, number: int) -> Seen:
        """What was seen since the last call."""
        columns = numpy.array(sorted(self._largest), numpy.uint32)
        numbers = numpy.array([self._largest[column] for column in sorted(self._largest)], numpy.float32)
        self._largest = {}
        codes = (numbers.view(numpy.uint32) + 0x8000 >> 16).astype(numpy.uint16)
        codes[numpy.isnan(numbers)] = 0x7FC0
        return Seen(number, number, columns, codes)


class Course(NamedTuple):
    """How a training went."""

    batches: int
    overflow: int | None
    """The batch in which an output was inf or nan."""
    told: list[tuple[int, str, LimitCrossing]]
    """In which batch, and the module."""


def train(
    make: Callable[[], tuple[nn.Module, Step]], batches: int, *, as_float16: bool = False, seed: int = 0, every: int = 1
) -> Course:
    """Trains for at most `batches` batches, or until an output is not finite. The agent sees one of `every`."""
    torch.manual_seed(seed)
    model, step = make()
    recorder, forecasts = Recorder(model, as_float16=as_float16), RootForecasts()
    rows: list[Seen] = []
    told: list[tuple[int, str, LimitCrossing]] = []
    for number in range(batches):
        with torch.autocast("cpu", torch.float16):
            step(number)
        seen = recorder.batch(number)
        if (seen.codes >= 0x7F80).any():
            return Course(number + 1, number, told)
        if number % every:
            continue
        rows.append(seen)
        if len(rows) % EVERY_BATCH == 0:
            rows = thinned(rows, lambda row: row.batch, EVERY_BATCH)
        told += [(number, recorder.names[column], each) for column, each in forecasts.update(rows, recorder.dtypes)]
    return Course(batches, None, told)


# -- models -------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Residual(nn.Module):
    """A residual stream of blocks, without a norm at its end."""

    def __init__(self, blocks: int = 4, norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) if norm else nn.Identity() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x


class Attention(nn.Module):
    """One head whose logits are a module's output."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.logits, self.out = nn.Identity(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.logits(self.q(x) @ self.k(x).transpose(-1, -2))
        return self.out(scores.float().softmax(-1).to(x.dtype) @ self.v(x))


class Lm(nn.Module):
    """Embedding, causal transformer layers, head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


class Recurrent(nn.Module):
    """A GRU cell by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(64, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        state = torch.zeros(len(tokens), WIDTH)
        states = []
        for at in range(tokens.shape[1]):
            state = self.cell(self.embedding(tokens[:, at]), state.to(self.embedding.weight.dtype))
            states.append(state)
        return self.head(torch.stack(states, 1))


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 8, WIDTH)
    return x, torch.roll(x, 1, -1).sin()


def tokens() -> Tensor:
    start = torch.randint(0, 64, (8, 1))
    return (start + torch.arange(17) * torch.randint(1, 4, (8, 1))) % 64


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module], Tensor],
    before: Callable[[int], None] = lambda batch: None,
    clip: float | None = None,
) -> tuple[nn.Module, Step]:
    """`before` is called with the number of each batch."""

    def step(batch: int) -> None:
        before(batch)
        optimizer.zero_grad()
        loss_of(model).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return model, step


def regression(model: nn.Module) -> Tensor:
    x, y = data()
    return F.mse_loss(model(x).float(), y)


def language(model: nn.Module) -> Tensor:
    batch = tokens()
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


# -- ten that overflow slowly ---------------------------------------------------------------------------------------


def learning_rate() -> tuple[nn.Module, Step]:
    """The learning rate grows by 3 % a batch, as in a range test, and nobody stops it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def grow(batch: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 * 1.03**batch

    return trained(model, optimizer, regression, grow)


def residual_stream() -> tuple[nn.Module, Step]:
    """The loss rewards a large residual stream: each block adds to it."""
    model = Residual()
    return trained(model, torch.optim.Adam(model.parameters(), 3e-2), lambda m: -16 * m(data()[0]).float().abs().mean())


def attention_logits() -> tuple[nn.Module, Step]:
    """Attention becomes ever sharper: q and k grow together."""
    model = Attention()

    def sharper(module: nn.Module) -> Tensor:
        x, _ = data()
        scores = module.q(x).float() @ module.k(x).float().transpose(-1, -2)
        return module(x).float().mean() * 0 - 16 * scores.abs().mean()

    return trained(model, torch.optim.Adam(model.parameters(), 2e-2), sharper)


def weights() -> tuple[nn.Module, Step]:
    """Weight decay with the wrong sign: 1 % a batch."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def decay(batch: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)

    return trained(model, optimizer, lambda m: m(data()[0]).float().tanh().mean(), decay)


def high_rate_sgd() -> tuple[nn.Module, Step]:
    """A linear model with a learning rate just above the stable limit: the error swings ever further."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(1)
    x = torch.randn(64, WIDTH)
    y = torch.randn(64, WIDTH)
    top = torch.linalg.eigvalsh(x.T @ x / (64 * WIDTH) * 2).max().item()
    optimizer = torch.optim.SGD(model.parameters(), 2.06 / top)
    return trained(model, optimizer, lambda m: F.mse_loss(m(x).float(), y))


def logits_of_head() -> tuple[nn.Module, Step]:
    """Cross-entropy of data that can be told apart, with a step of the same length for ever: the logits only grow."""
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.3)

    def loss(module: nn.Module) -> Tensor:
        x = torch.randn(32, WIDTH)
        label = x[:, :8].argmax(-1)
        return F.cross_entropy(module(x).float(), label)

    def same_length(batch: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.sign(), alpha=0.02)

    return trained(model, optimizer, loss, same_length)


def norm_gain() -> tuple[nn.Module, Step]:
    """The gain of a LayerNorm grows, and with it all that is behind it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
    optimizer = torch.optim.Adam(model[1].parameters(), 20.0)
    return trained(model, optimizer, lambda m: -16 * m(data()[0]).float().abs().mean())


def embedding() -> tuple[nn.Module, Step]:
    """An embedding without decay that one token's gradient drives in one direction."""
    model = Lm()
    optimizer = torch.optim.Adam(model.embedding.parameters(), 60.0)

    def loss(module: nn.Module) -> Tensor:
        return language(module) - 16 * module.embedding(tokens()).float().abs().mean()

    return trained(model, optimizer, loss)


def recurrent_state() -> tuple[nn.Module, Step]:
    """A state that is carried from batch to batch and amplified by 2 % each time."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(1.02 * torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])
    state = [torch.randn(8, WIDTH)]

    def loss(module: nn.Module) -> Tensor:
        given = state[0] + 0.02 * torch.randn(8, WIDTH)
        returned = module(given)
        state[0] = returned.detach().float()
        return returned.float().tanh().mean()

    return trained(model, torch.optim.SGD(model.parameters(), 1e-5), loss)


def input_scale() -> tuple[nn.Module, Step]:
    """The data is not normalised and its scale drifts: by 1.5 % a batch."""
    model = Mlp()
    seen = [0]

    def loss(module: nn.Module) -> Tensor:
        x, y = data()
        return F.smooth_l1_loss(module(x * 1.015 ** seen[0]).float(), y)

    def count(batch: int) -> None:
        seen[0] = batch

    return trained(model, torch.optim.SGD(model.parameters(), 1e-4), loss, count, clip=1.0)


SLOW = [
    learning_rate, residual_stream, attention_logits, weights, high_rate_sgd, logits_of_head, norm_gain, embedding,
    recurrent_state, input_scale,
]  # fmt: skip


# -- ten that are healthy -------------------------------------------------------------------------------------------


def _healthy(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    lr: float,
    optimizer: type[torch.optim.Optimizer],
    **more: float,
) -> tuple[nn.Module, Step]:
    return trained(model, optimizer(model.parameters(), lr, **more), loss, clip=1.0)  # type: ignore[call-arg]


def classified(model: nn.Module) -> Tensor:
    x = torch.randn(32, WIDTH)
    return F.cross_entropy(model(x).float(), x[:, :8].argmax(-1))


def imaged(model: nn.Module) -> Tensor:
    x = torch.randn(8, 3, 8, 8)
    return F.cross_entropy(model(x).float(), x.mean((2, 3)).argmax(-1))


def coded(model: nn.Module) -> Tensor:
    x, _ = data()
    return F.mse_loss(model(x).float(), x)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(1024, 3),
    )  # fmt: skip


ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
HEALTHY: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "mlp, AdamW": lambda: _healthy(Mlp(), regression, 3e-3, ADAMW),
    "mlp, SGD with momentum": lambda: _healthy(Mlp(), regression, 0.1, SGD, momentum=0.9),
    "residual with norms": lambda: _healthy(Residual(), regression, 3e-3, ADAMW),
    "residual without norms": lambda: _healthy(Residual(norm=False), regression, 1e-3, ADAMW),
    "attention": lambda: _healthy(nn.Sequential(Attention(), Mlp()), regression, 3e-3, ADAMW),
    "language model": lambda: _healthy(Lm(), language, 3e-3, ADAMW),
    "language model, 4 layers": lambda: _healthy(Lm(4), language, 1e-3, ADAMW),
    "recurrent": lambda: _healthy(Recurrent(), language, 1e-2, ADAMW),
    "classifier": lambda: _healthy(
        nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 8)), classified, 1e-2, ADAMW
    ),
    "convolutions": lambda: _healthy(convolutions(), imaged, 3e-3, ADAMW),
}


# -- the table ------------------------------------------------------------------------------------------------------


def slow_rows(only: str | None = None, seed: int = 0, every: int = 1) -> Iterator[tuple[str, Course]]:
    for make in SLOW:
        if only in (None, make.__name__):
            yield make.__name__.replace("_", " "), train(make, 3000, seed=seed, every=every)


def healthy_rows(batches: int, only: str | None = None, seed: int = 0, every: int = 1) -> Iterator[tuple[str, Course]]:
    for name, make in HEALTHY.items():
        if only in (None, name):
            yield name, train(make, batches, as_float16=True, seed=seed, every=every)


def main() -> None:
    parser = argparse.ArgumentParser(description="How early the forecast tells of an overflow.")
    parser.add_argument("--only", default=None, metavar="NAME", help="one scenario or model")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights and the data (0)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="the agent sees one batch in N (1)")
    parser.add_argument("--batches", type=int, default=500, metavar="N", help="of each healthy model (500)")
    arguments = parser.parse_args()
    print(time.strftime("%Y-%m-%d"))
    print(
        "| scenario | overflow in batch | first told in | of | lead | said | in the range |\n"
        "|---|---|---|---|---|---|---|"
    )
    early = there = 0
    for name, course in slow_rows(arguments.only, arguments.seed, arguments.every):
        if course.overflow is None:
            print(f"| {name} | none in {course.batches} | | | | | |")
            continue
        if not course.told:
            print(f"| {name} | {course.overflow} | not told | | 0 | | |")
            continue
        batch, module, said = course.told[0]
        lead = course.overflow - batch
        inside = said.earliest <= lead <= said.latest
        early, there = early + (lead >= 5), there + inside
        print(
            f"| {name} | {course.overflow} | {batch} | `{module}` | {lead} | {said.after} ({said.earliest} to "
            f"{said.latest}) | {'yes' if inside else 'no'} |"
        )
    print(f"\nA lead of at least 5 batches: {early} of {len(SLOW)}; in the range that was said: {there}.\n")
    print("| healthy model | batches | told |\n|---|---|---|")
    for name, course in healthy_rows(arguments.batches, arguments.only, arguments.seed, arguments.every):
        said_of = ", ".join(f"`{module}` in batch {batch}" for batch, module, _ in course.told)
        overflow = " (overflow!)" if course.overflow is not None else ""
        print(f"| {name} | {course.batches}{overflow} | {said_of or 'nothing'} |")


if __name__ == "__main__":
    main()
