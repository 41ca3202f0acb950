"""A verdict of lines of logs, and the lines as they are quoted."""

from __future__ import annotations

from ...core.codes import Certainty, VerdictKind
from ..facts.log_lines import LogLine
from ..report.verdict import ConcurrentOrigin, Verdict

_MOST_LINES = 8
_MOST_LETTERS = 200


def from_lines(
    kind: VerdictKind,
    statement: str,
    steps: list[str],
    lines: list[LogLine],
    *,
    ranks: list[int] | None = None,
    host: str = "",
    certainty: Certainty = Certainty.SUPPORTED,
) -> Verdict:
    """`ranks`: those at fault; one is the verdict's, several are beside each other."""
    ranks = ranks or []
    several = (
        [ConcurrentOrigin(rank, "", "", None, "", text="see the statement") for rank in ranks] if ranks[1:] else []
    )
    rank = ranks[0] if len(ranks) == 1 else None
    return Verdict(
        kind,
        statement,
        certainty,
        rank=rank,
        host=host or None,
        evidence=evidence_of(*lines),
        next=steps,
        concurrent=several,
    )


def evidence_of(*lines: LogLine) -> list[str]:
    """Each line as it stands, with its place: `slurm-17.out:4711: [Rank 3] Watchdog caught ...`."""
    found = [f"{line.place}: {' '.join(line.text.split())[:_MOST_LETTERS]}" for line in lines]
    left = len(found) - _MOST_LINES
    return [*found[:_MOST_LINES], *([f"and {left} more lines"] if left > 0 else [])]


def writer_of(line: LogLine) -> str:
    """`rank 3: `, `node7: `; "" where the line does not say it."""
    return f"rank {line.rank}: " if line.rank is not None else f"{line.host}: " if line.host else ""
