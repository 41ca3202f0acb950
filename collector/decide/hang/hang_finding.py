"""What follows from where the ranks of a job stood."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """`did not come`, `left early`, `mismatch`, `order`, `all came`, `does not end`; "" where none of them is known."""
    may_end: bool = True
    """Whether the job may be ended for it: some rank waits for others, and none goes on."""
    why_not: str = "no rank is seen to wait for another"
    """If it may not."""
