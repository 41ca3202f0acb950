"""Whom the preflight names for each fault of NCCL on 2, 3 and 8 ranks of one node, and how long that takes.

    echo 'python tests/fakes/cuda/preflight_faults.py' | python3 tests/fakes/cuda/run.py --shell

One line for each run; the exit code is 1 if one of them names a wrong rank, or none where it should name one. The ranks
are forked from a process that has imported torch: the verdict is the collector's, from what all ranks conclude.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.core.events.preflight_events import PreflightResult, RankOutcome
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.messages import EventMessage
from gpuwatch.tests.needs import RELEASE
from gpuwatch.worker.preflight.steps import PreflightEnd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "worker" / "preflight"))

from ranks_server import answer  # it lies there

_TOLD = ("fail-init", "cuda-error-init", "fail-op", "die-op", "async-error")
TOLD = _TOLD if RELEASE < (2, 15) else _TOLD[:-1]
"""The rank itself knows of these: it tells the others, and is named on any number of ranks. nccl2, the default from
torch 2.15 on, does not ask for asynchronous errors."""
SILENT = ("hang-init", "hang-op", "silent-op")
"""All ranks wait until the deadline. Pairs of them then show which it is, if there are three or more."""
FAULTS = (*TOLD, "bad-sum", "block-op", *SILENT)
SIZES = (2, 3, 8)


@dataclass(frozen=True)
class FaultyPreflight:
    """One run."""

    verdict: Verdict
    seconds: float
    """From the first process group to the conclusion, on the slowest rank."""
    stopped: int
    """The number of ranks that another one has told to stop."""


def preflight(nproc: int, fault: str, at: int, timeout_s: float) -> FaultyPreflight:
    """A quick preflight with a fault in the NCCL of rank `at`. Each process group must end within `timeout_s`."""
    environment = {"STAND_IN_NCCL_FAULT": f"{at}:{fault}", "STAND_IN_CUDA_DEVICES": str(nproc)}
    request = {"call": "course", "ranks": list(range(nproc)), "timeout_s": timeout_s, "environment": environment}
    found = answer(request)
    results, stopped = [], 0
    for rank, outcome in found.items():
        end = msgspec.json.decode(outcome["end"], type=PreflightEnd)
        assert end.backend == "nccl", end
        mine = next((one for one in end.outcomes if one.rank == rank), RankOutcome(rank, "ok"))
        stopped += mine.detail.startswith("it stopped, as ")
        what = (mine.outcome, mine.stage, mine.detail, True, end.backend, end.device)
        results.append(EventMessage(PreflightResult(RunPosition(rank), *what, findings=end.findings)))
    verdict = decide(fold([("a0", number, body) for number, body in enumerate(results, 1)]))
    return FaultyPreflight(verdict, max(outcome["seconds"] for outcome in found.values()), stopped)


def places(nproc: int) -> list[int]:
    """The first, the middle and the last rank."""
    return sorted({0, nproc // 2, nproc - 1})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="numbers of ranks")
    parser.add_argument("--fault", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--at", type=int, nargs="+", help="the faulty ranks (the first, a middle and the last one)")
    parser.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS", help="of each process group (60)")
    options = parser.parse_args()
    print(
        "| ranks | fault | in rank | named | certainty | stopped | seconds | of the deadline |",
        "|---" * 8 + "|",
        sep="\n",
    )
    wrong = 0
    for nproc in options.ranks:
        for fault in options.fault:
            for at in options.at or places(nproc):
                run = preflight(nproc, fault, at, options.deadline)
                rank = run.verdict.rank
                named = "no rank" if rank is None else f"rank {rank}"
                cells = [nproc, fault, at, named, run.verdict.certainty, run.stopped, f"{run.seconds:.1f}"]
                print(f"| {' | '.join(map(str, cells))} | {run.seconds / options.deadline:.2f} |", flush=True)
                expected = at if nproc > 2 or fault not in SILENT else None
                if (run.verdict.kind, rank) != ("preflight", expected):
                    wrong += 1
                    print(f"WRONG: {run.verdict.statement}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
