"""How long the commands take that should answer at once.

    python benchmarks/startup.py [--rounds N]

Prints the best and the median of N starts each, beside a Python that does nothing. And what a Python process below
`gpuwatch run` that is no rank takes more of the processor: the median of pairs, one start without and one with it.
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

GPUWATCH = str(Path(sys.executable).with_name("gpuwatch"))
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import gpuwatch": [sys.executable, "-c", "import gpuwatch"],
    "gpuwatch --help": [GPUWATCH, "--help"],
    "gpuwatch --version": [GPUWATCH, "--version"],
    "gpuwatch report --help": [GPUWATCH, "report", "--help"],
}
PAIRS = 100
TARGETS_S = {"gpuwatch --help": 0.3, "gpuwatch --version": 0.3}


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the commands take that should answer at once.")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="starts of each command (10)")
    rounds = parser.parse_args().rounds
    compileall.compile_dir(PATH_FOLDER, quiet=2)  # as pip does it at an installation
    pairs = sorted(more_s() for _ in range(max(rounds, PAIRS)))
    print(
        f"below gpuwatch run       median {1000 * statistics.median(pairs):+.2f} ms of {len(pairs)} pairs, target 1 ms"
    )
    for name, command in COMMANDS.items():
        took = sorted(seconds(command) for _ in range(rounds))
        target = f", target {TARGETS_S[name]} s" if name in TARGETS_S else ""
        print(f"{name:24} best {took[0]:.3f} s, median {statistics.median(took):.3f} s{target}")


def more_s() -> float:
    """How much more of the processor a Python process takes that is started below a run."""
    command = COMMANDS["python -c pass"]
    below = environment_of_ranks(Path(tempfile.gettempdir()), None, os.environ)
    return -processor_s(command, dict(os.environ)) + processor_s(command, below)


def processor_s(command: list[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds(command, environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds(command: list[str], environment: dict[str, str] | None = None) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
