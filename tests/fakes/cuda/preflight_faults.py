"""Which rank `gpuwatch check` names for each fault of NCCL, on 2, 3 and 8 ranks of one node, and how long that takes.

    echo 'python tests/fakes/cuda/preflight_faults.py' | python3 tests/fakes/cuda/run.py --shell
    echo 'python tests/fakes/cuda/preflight_faults.py --ranks 3 --fault fail-op die-op' | ...

One line for each run; the exit code is 1 if one of them names a wrong rank, or finds no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOLD = ("fail-init", "cuda-error-init", "fail-op", "die-op", "async-error")
"""The rank itself knows of these: it tells the others, and is named on any number of ranks."""
WRONG = ("bad-sum",)
"""All ranks see these at once."""
SILENT = ("hang-init", "hang-op", "silent-op")
"""The ranks wait for one another until the deadline. Pairs of ranks tell who it is, of three ranks or more."""
STUCK = ("block-op",)
"""As these, but the rank itself does not come back at the deadline."""
FAULTS = (*TOLD, *WRONG, *STUCK, *SILENT)
DEADLINES_S = {2: 30, 3: 30, 8: 120}
"""Number of ranks -> --preflight-timeout. All of them import torch within that."""
GROUP_SHARE = 0.7
"""The ranks of a group wait for each other for this share of it, at most 42 s."""


@dataclass(frozen=True)
class CheckedFault:
    """One run."""

    nproc: int
    fault: str
    at: int
    code: int
    verdict: dict[str, object]
    backends: set[str]
    seconds: float
    """The slowest rank's, in the stage of the group."""
    log: str

    @property
    def named(self) -> str:
        rank = self.verdict["rank"]
        return "unknown" if rank is None else f"rank {rank}"

    @property
    def is_right(self) -> bool:
        """The rank, or nobody; and a failure in any case."""
        return self.code == 3 and self.verdict["rank"] in (self.at, None)


def check(folder: Path, nproc: int, fault: str = "", at: int = 0, timeout_s: float = 0.0) -> CheckedFault:
    """Run `gpuwatch check` with a fault in the NCCL of rank `at`."""
    timeout_s = timeout_s or DEADLINES_S[nproc]
    options = ["--nproc-per-node", str(nproc), "--alloc", "16MiB", "--bandwidth-size", "1MiB"]
    command = [sys.executable, "-m", "gpuwatch.cli.main", "check", "--standalone", *options]
    variables = {"STAND_IN_NCCL_FAULT": f"{at}:{fault}" if fault else "", "STAND_IN_CUDA_DEVICES": str(nproc)}
    done = subprocess.run(
        [*command, "--preflight-timeout", str(timeout_s)],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=560,
    )
    file = folder / "gpuwatch-runs" / "latest" / "report.json"
    assert file.is_file(), done.stderr
    report = json.loads(file.read_text())
    stages = report["preflight"]["stages"]
    before_s = sum(stage["seconds"] for stage in stages if stage["stage"] != "node group")
    backends = {rank["preflight"]["backend"] for rank in report["ranks"]}
    seconds = report["preflight"]["seconds"] - before_s
    return CheckedFault(nproc, fault, at, done.returncode, report["verdict"], backends, seconds, done.stderr)


def places(nproc: int) -> list[int]:
    """The first, the middle and the last rank."""
    return sorted({0, nproc // 2, nproc - 1})


def runs(ranks: list[int], faults: list[str], at: list[int]) -> Iterator[CheckedFault]:
    for nproc in ranks:
        for fault in faults:
            for place in at or places(nproc):
                with tempfile.TemporaryDirectory() as folder:
                    yield check(Path(folder), nproc, fault, place)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(DEADLINES_S), help="numbers of ranks")
    parser.add_argument("--fault", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--at", type=int, nargs="+", default=[], help="the faulty ranks (first, middle and last)")
    options = parser.parse_args()
    print("| ranks | fault | of rank | named | certainty | seconds | of the group's deadline |\n|--|--|--|--|--|--|--|")
    is_right = True
    for one in runs(options.ranks, options.fault, options.at):
        share = one.seconds / (min(60, DEADLINES_S[one.nproc]) * GROUP_SHARE)
        cells = [one.nproc, one.fault, one.at, one.named, one.verdict["certainty"], f"{one.seconds:.1f}", f"{share:.2f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if not one.is_right:
            is_right = False
            print(f"WRONG: {one.code} {one.verdict['statement']}\n{one.log}", flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
