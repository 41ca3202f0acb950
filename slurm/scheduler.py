"""What is asked of SLURM: to take a job, and how its tasks are. The commands themselves are in sbatch.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

OVER = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "SPECIAL_EXIT",
        "TIMEOUT",
    }
)
"""States that a job does not leave. A requeued one is PENDING again, and so never in one of these meanwhile."""


@dataclass(frozen=True)
class JobTask:
    """A job, or one task of an array."""

    id: str
    """`17`, `17_3`"""
    state: str
    """As squeue writes it: RUNNING."""
    reason: str = ""
    nodes: str = ""
    exit_code: int = 0
    """128 + N if signal N has ended it."""

    @property
    def over(self) -> bool:
        """It will not run any more."""
        return self.state in OVER


class Scheduler(Protocol):
    """SLURM, as far as it is needed here."""

    def submit(self, script: str, options: list[str]) -> str:
        """Hand a script to sbatch. Returns the job's id; raises UsageError when sbatch does not take it."""

    def tasks(self, job: str) -> list[JobTask] | None:
        """How they are; [] if SLURM knows no such job any more, None if it does not answer now."""
