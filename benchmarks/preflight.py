"""What the preflight adds to a healthy start: whole runs of a script that only makes a gloo group.

    python benchmarks/preflight.py [--rounds N] [--nproc N] [--format text|json]

Plain torchrun and `gpuwatch launch` take turns, in a new random order in every round; each run is compared with plain
torchrun of its own round, so that what slows down the machine for a while slows down both. Shown are the median of the
seconds that it adds, their interquartile range, and a 95 % interval of the median. `plain again` is the noise of all
this: it should be 0. Start and end of gpuwatch itself are in these figures, too: `preflight off` shows them alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from turns import interval

SCRIPT = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
PLAIN, AGAIN, OFF, QUICK = "plain torchrun", "plain again", "preflight off", "preflight quick"
TARGETS_S = {QUICK: 5.0}
"""Most seconds beyond plain torchrun."""
TIMEOUT_S = 300


@dataclass(frozen=True)
class Row:
    """One variant. `added` is against plain torchrun, in seconds."""

    variant: str
    median_s: float
    added_s: float
    quartiles_s: tuple[float, float]
    interval_s: tuple[float, float]
    target_s: float | None

    @property
    def verdict(self) -> str:
        """Whether the target was met; `within noise` where the interval holds both answers."""
        if self.target_s is None:
            return ""
        low, high = self.interval_s
        clear = high <= self.target_s or low > self.target_s
        return ("ok" if self.added_s <= self.target_s else "over") + ("" if clear else ", within noise")


def commands(nproc: int, script: str) -> dict[str, list[str]]:
    """The command of each variant."""
    job = ["--standalone", "--nproc-per-node", str(nproc), script]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *job]
    launch = [sys.executable, "-m", "gpuwatch.cli.main", "launch"]
    return {
        PLAIN: torchrun,
        AGAIN: torchrun,
        OFF: [*launch, "--preflight", "off", *job],
        QUICK: [*launch, "--preflight", "quick", *job],
    }


def seconds_of(command: list[str], folder: str) -> float:
    """From the start of the command to its end. Ends this program if it fails."""
    began = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    took = time.monotonic() - began
    if done.returncode != 0:
        sys.exit(f"exit code {done.returncode} of {' '.join(command)}\n{done.stderr}")
    return took


def measure(rounds: int, nproc: int) -> dict[str, list[float]]:
    """Seconds of every run, by variant; a first round, in which files are read from the disk, is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "group.py")
        script.write_text(SCRIPT)
        variants = commands(nproc, str(script))
        found: dict[str, list[float]] = {name: [] for name in variants}
        for number in track(range(rounds + 1), "rounds", console=Console(stderr=True), transient=True):
            order = list(variants)
            random.shuffle(order)
            for name in order:
                took = seconds_of(variants[name], folder)
                if number > 0:
                    found[name].append(took)
    return found


def rows_of(found: dict[str, list[float]]) -> list[Row]:
    """Each variant against plain torchrun, round by round."""
    rows = []
    for name, values in found.items():
        added = [a - b for a, b in zip(values, found[PLAIN], strict=True)]
        quartiles = statistics.quantiles(added, n=4, method="inclusive")
        rows.append(
            Row(
                name,
                statistics.median(values),
                statistics.median(added),
                (quartiles[0], quartiles[2]),
                interval(added),
                TARGETS_S.get(name),
            )
        )
    return rows


def table(rows: list[Row], title: str) -> Table:
    """A table for people."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("variant", no_wrap=True)
    for head in ("median", "added", "middle half", "95 % of the median", "at most"):
        shown.add_column(head, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for row in rows:
        compared = row.variant != PLAIN
        shown.add_row(
            row.variant,
            f"{row.median_s:.2f} s",
            f"{row.added_s:+.2f} s" if compared else "",
            "{:+.2f} - {:+.2f}".format(*row.quartiles_s) if compared else "",
            "{:+.2f} - {:+.2f}".format(*row.interval_s) if compared else "",
            f"{row.target_s:+.2f} s" if row.target_s is not None else "",
            row.verdict,
        )
    return shown


def at_least(least: int):
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number of {least} or more, found {text!r}")
        return int(text)

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=15)
    parser.add_argument("--nproc", type=at_least(1), default=2, help="ranks (2)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args()
    rows = rows_of(measure(options.rounds, options.nproc))
    if options.format == "json":
        print(json.dumps([asdict(row) for row in rows]))
        return
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    Console(width=110).print(
        table(rows, f"{options.nproc} ranks that make a gloo group, {options.rounds} rounds ({machine})")
    )


if __name__ == "__main__":
    main()
