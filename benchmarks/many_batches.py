"""Whether a long run gets slower under gpuwatch: ten thousand batches of a small model.

    python benchmarks/many_batches.py [--rounds N]

Prints, for plain torchrun and for `gpuwatch launch`, by how much the memory of the rank has grown, and the median time
of the last 1,000 batches against that of batches 1,000 to 2,000. Both ratios should be 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "e2e" / "scripts" / "many_batches.py"
COMMANDS = {
    "plain torchrun": ["torch.distributed.run", "--nproc-per-node", "1"],
    "gpuwatch launch": ["gpuwatch.cli.main", "launch", "--nproc-per-node", "1", "--preflight", "off"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether a long run gets slower under gpuwatch.")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="both take turns so often (3)")
    rounds = parser.parse_args().rounds
    for number in range(1, rounds + 1):
        for name, command in COMMANDS.items():
            grown, ratio = run(command)
            print(f"round {number}: {name:15}  memory {grown / 2**20:+6.2f} MiB, last / first batches {ratio:.3f}")


def run(command: list[str]) -> tuple[int, float]:
    """(bytes grown, ratio of the medians) as the script prints them."""
    with tempfile.TemporaryDirectory(prefix="many-batches-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", *command, str(SCRIPT), "10000"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    words = done.stdout.split()
    return int(words[1]), float(words[3])


if __name__ == "__main__":
    main()
