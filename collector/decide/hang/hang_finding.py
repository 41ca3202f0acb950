"""What follows from where the ranks of a job stood."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Outlook:
    """Whether a job that stands still can go on by itself."""

    kind: Literal["cannot go on", "all wait", "may go on"]
    """`cannot go on`: each rank waits for others, is stopped, or has left, and what they wait for never comes. `all
    wait`: as far as can be seen, and it may still come. `may go on`: a rank stands in code of its own, or was not
    seen."""
    free: list[int] = field(default_factory=list)
    """The ranks that may go on."""


@dataclass(frozen=True)
class HangFinding:
    """What follows from one time of asking."""

    statement: str
    certainty: str
    """As in a verdict."""
    rank: int | None = None
    """The rank that the others wait for; None where several can be, or none."""
    others: list[int] = field(default_factory=list)
    """Further ranks that did not come."""
    evidence: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    cause: str = ""
    """`did not come`, `left early`, `mismatch`, `order`, `all came`, `does not end`, `last one`; "" where none of them
    is known."""
    may_end: bool = True
    """Whether the job may be ended for it at all: some rank waits for others, and none goes on."""
    outlook: Outlook = field(default_factory=lambda: Outlook("may go on"))
