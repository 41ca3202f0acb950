"""What `--every auto` costs, and whether it still finds an overflow: ten jobs with short steps on the host.

    python benchmarks/every_auto.py [--rounds N] [--jobs N] [--seed N]

Of each job, in one process: plain steps, steps that are all watched, and steps as `--every auto` watches them take
turns, 32 at a time (its choice is made before). Printed is the median of the rounds' ratios to plain, with a 95 %
interval. Then an operation of a drawn block overflows in a drawn batch, in the forward or in the backward, once the
choice is made. `at once`: the second run of that batch named the block. `after a restart`: a run that begins anew, in
which all is watched as after an overflow, named it. `not found` and `wrong` are the other two.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any, NamedTuple

import gpuwatch
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.events.alarm_evidence import SecondRun
from gpuwatch.core.events.own_limits import WatchChoice
from torch import nn
from turns import in_turns, interval

_AT_A_TIME = 32


class JobSize(NamedTuple):
    """A small job: blocks of two Linear layers and a LayerNorm, with a residual."""

    width: int
    blocks: int
    rows: int


JOBS = [
    *(JobSize(64, 12, 64), JobSize(64, 24, 64), JobSize(128, 12, 64), JobSize(128, 24, 64), JobSize(128, 12, 256)),
    *(JobSize(256, 8, 128), JobSize(256, 16, 128), JobSize(256, 12, 256), JobSize(512, 4, 128), JobSize(384, 8, 256)),
]


class _BackwardFault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Pass a copy on."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Make an inf."""
        return gradients[0] * 1e38 * 1e38


class ResidualBlock(nn.Module):
    """One block. `fault` is "", "forward" or "backward"."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.fault = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, width] -> [rows, width]."""
        made = self.down(torch.relu(self.up(self.norm(x))))
        if self.fault == "forward":
            made = made * 1e38 * 1e38
        return x + (_BackwardFault.apply(made) if self.fault == "backward" else made)


class SmallJob:
    """A model, its optimizer and its batch."""

    def __init__(self, size: JobSize) -> None:
        torch.manual_seed(0)
        self.blocks = [ResidualBlock(size.width) for _ in range(size.blocks)]
        self.model = nn.Sequential(*self.blocks, nn.Linear(size.width, 10))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._x, self._y = torch.randn(size.rows, size.width), torch.randint(0, 10, (size.rows,))

    def step(self) -> float:
        """One step, in seconds of this thread's processor time: other programs on the machine count for less."""
        began = time.thread_time()
        nn.functional.cross_entropy(self.model(self._x), self._y).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.thread_time() - began


def measure(size: JobSize, rounds: int) -> str:
    """A line of the table of costs."""
    job = SmallJob(size)
    watch = gpuwatch.watch(job.model, every="auto")
    for _ in range(60):
        job.step()
    hooks, pace = watch._hooks, watch._hooks.progress.pace
    watch._read()
    choice = next(event for event in watch._events if isinstance(event, WatchChoice))
    took: dict[str, list[float]] = {"plain": [], "all": [], "auto": []}

    def run(name: str) -> None:
        if name == "plain":
            hooks.detach()
        pace._every = choice.every if name == "auto" else 1
        job.step()
        took[name].append(statistics.mean(job.step() for _ in range(_AT_A_TIME)))
        if name == "plain":
            hooks.attach()
            pace._every = 1
            for _ in range(2):
                job.step()  # the hooks on its parameters are made again, which no training does in its midst

    in_turns(list(took), rounds, run)
    watch.remove()
    cells = [f"{1e3 * statistics.median(took['plain']):6.1f} ms"]
    for name in ("all", "auto"):
        ratios = [one / plain for one, plain in zip(took[name], took["plain"], strict=True)]
        low, high = interval(ratios)
        cells.append(f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
    chosen = f"{100 * choice.cost:.0f} % +- {100 * choice.margin:.0f}, N = {choice.every}"
    return f"| {size.width} x {size.blocks}, {size.rows} rows | {' | '.join(cells)} | {chosen} |"


def found_by(size: JobSize, block: int, fault: str, batch: int, every: Any) -> str | None:
    """The module that a run names; "" if it names none, None if it saw no overflow."""
    job = SmallJob(size)
    watch = gpuwatch.watch(job.model, every=every)
    try:
        for number in range(batch + 4):
            job.blocks[block].fault = fault if number == batch else ""
            job.step()
    except OverflowDetected:
        watch._read()
        runs = [event.operation for event in watch._events if isinstance(event, SecondRun)]
        if runs and runs[0] is not None:
            return runs[0].module
        (anomaly, *_) = watch.anomalies
        return "" if "not inspected" in anomaly.cause else anomaly.module
    finally:
        watch.remove()
    return None


def place(size: JobSize, draw: random.Random) -> str:
    """How the place of one drawn overflow is found."""
    block, fault = draw.randrange(size.blocks), draw.choice(["forward", "forward", "backward"])
    batch = draw.randrange(60, 120)
    found = found_by(size, block, fault, batch, "auto")
    how = "at once"
    if not found:
        how = "after a restart" if found == "" else "not seen, then after a restart"
        found = found_by(size, block, fault, 3, 1)
    right = found is not None and (found == str(block) or found.startswith(f"{block}."))
    return f"{fault} of block {block} in batch {batch}: {how if right else f'wrong: {found}' if found else 'not found'}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="turns of each variant (15)")
    parser.add_argument("--jobs", type=int, default=len(JOBS), metavar="N", help="the first N of the jobs (10)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the overflows (1)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| job | plain step | all watched / plain | auto / plain | cost measured, N |\n|---|---|---|---|---|")
    for size in JOBS[: given.jobs]:
        print(measure(size, given.rounds), flush=True)
    draw = random.Random(given.seed)
    for size in JOBS[: given.jobs]:
        print(f"{size.width} x {size.blocks}: {place(size, draw)}", flush=True)


if __name__ == "__main__":
    main()
