"""How long the commands take that should answer at once.

    python benchmarks/startup.py [--rounds N]

Prints the best and the median of N starts each, beside a Python that does nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

GPUWATCH = str(Path(sys.executable).with_name("gpuwatch"))
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import gpuwatch": [sys.executable, "-c", "import gpuwatch"],
    "gpuwatch --help": [GPUWATCH, "--help"],
    "gpuwatch --version": [GPUWATCH, "--version"],
    "gpuwatch report --help": [GPUWATCH, "report", "--help"],
}
TARGETS_S = {"gpuwatch --help": 0.3, "gpuwatch --version": 0.3}


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the commands take that should answer at once.")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="starts of each command (10)")
    rounds = parser.parse_args().rounds
    for name, command in COMMANDS.items():
        took = sorted(seconds(command) for _ in range(rounds))
        target = f", target {TARGETS_S[name]} s" if name in TARGETS_S else ""
        print(f"{name:24} best {took[0]:.3f} s, median {statistics.median(took):.3f} s{target}")


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
