"""How long the commands take that should answer at once, and what a launch of a script of one line takes over torchrun.

    python benchmarks/startup.py [--rounds N]

Prints the table of docs/cost.md: elapsed seconds, the best and the median of N starts, and seconds of the processor
with all children. In each round every command is started once. And what a Python process below `gpuwatch run` that is
no rank takes more of the processor: the median of pairs, one start without and one with it.
"""

from __future__ import annotations

import argparse
import compileall
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpuwatch.launcher.run.command import PATH_FOLDER, environment_of_ranks

BIN = Path(sys.executable).parent
GPUWATCH, TORCHRUN = str(BIN / "gpuwatch"), str(BIN / "torchrun")
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import gpuwatch": [sys.executable, "-c", "import gpuwatch"],
    "gpuwatch --help": [GPUWATCH, "--help"],
    "gpuwatch --version": [GPUWATCH, "--version"],
    "gpuwatch report --help": [GPUWATCH, "report", "--help"],
    "gpuwatch launch, a wrong option": [GPUWATCH, "launch", "--evry", "3", "one.py"],
    "gpuwatch submit, a wrong option": [GPUWATCH, "submit", "--evry", "3", "one.py"],
    "gpuwatch submit --print": [GPUWATCH, "submit", "--print", "--nodes", "2", "one.py"],
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    "torchrun, one line": [TORCHRUN, "one.py"],
    "gpuwatch launch --preflight off, one line": [GPUWATCH, "launch", "--preflight", "off", "one.py"],
}
MEANT = {"gpuwatch launch, a wrong option": 2, "gpuwatch submit, a wrong option": 2}
"""Exit codes that are not 0. A script that calls no module ends with 6."""
TARGETS_S = {"gpuwatch --help": 0.3, "gpuwatch --version": 0.3, "gpuwatch submit --print": 1.0}
MORE_THAN_TORCHRUN_S = 0.5
PAIRS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the commands take that should answer at once.")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="starts of each command (10)")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"pairs below gpuwatch run ({PAIRS})")
    given = parser.parse_args()
    compileall.compile_dir(PATH_FOLDER, quiet=2)  # as pip does it at an installation
    if given.pairs:
        pairs = sorted(more_s() for _ in range(given.pairs))
        print(
            f"below gpuwatch run: median {1000 * statistics.median(pairs):+.2f} ms of {len(pairs)} pairs, target 1 ms"
        )
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "one.py").write_text("print('one')\n")
        for _ in range(given.rounds):
            for name, command in COMMANDS.items():
                took[name].append(cost_of(command, folder, MEANT.get(name, 0)))
    print(f"{given.rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print("\n| command | best, s | median, s | processor, s | target, s |\n|---|---|---|---|---|")
    for name, rounds in took.items():
        elapsed = sorted(seconds for seconds, _ in rounds)
        used = statistics.median(processor for _, processor in rounds)
        middle, target = statistics.median(elapsed), TARGETS_S.get(name, "")
        print(f"| `{name}` | {elapsed[0]:.2f} | {middle:.2f} | {used:.2f} | {target} |")
    ours, theirs = (took[name] for name in reversed(list(COMMANDS)[-2:]))
    more = statistics.median(a - b for (a, _), (b, _) in zip(ours, theirs, strict=True))
    print(f"\nlaunch over torchrun, median of the rounds: {more:+.2f} s, target {MORE_THAN_TORCHRUN_S} s")


def more_s() -> float:
    """How much more of the processor a Python process takes that is started below a run."""
    command = COMMANDS["python -c pass"]
    below = environment_of_ranks(Path(tempfile.gettempdir()), None, os.environ)
    return -processor_s(command, dict(os.environ)) + processor_s(command, below)


def processor_s(command: list[str], environment: dict[str, str]) -> float:
    before = used_s()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return used_s() - before


def used_s() -> float:
    """What the children that have ended have used of the processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cost_of(command: list[str], folder: str, code: int) -> tuple[float, float]:
    """Seconds that have passed, and seconds of the processor."""
    used, began = used_s(), time.perf_counter()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    assert done.returncode in (code, 6), f"{command} ended with {done.returncode}"
    return seconds, used_s() - used


if __name__ == "__main__":
    main()
