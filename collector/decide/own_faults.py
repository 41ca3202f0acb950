"""Which of gpuwatch's own faults can have cost a frame: what was not recorded may be bad, or may be the maker. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.records import Fault
from ..facts.facts import RankFacts

_HARMLESS = frozenset(
    (
        "preflight",
        "hooks",
        "device note",
        "native frame writer",
        "stacks",
        "collectives",
        "step times",
        "history",
        "forecasts",
        "hottest modules",
    )
)
"""Parts whose faults cost no frame. `hooks`, `device note` and `native frame writer` are notes about how frames are
read and written. Without `stacks` or `collectives` a hang is told with less. The last four are the node agent's: they
look back at frames that it has."""


def that_cost_frames(faults: Iterable[Fault]) -> list[Fault]:
    """The faults after which frames may be missing."""
    return [fault for fault in faults if fault.part not in _HARMLESS]


def doubts_about(rank: RankFacts) -> list[str]:
    """What may be missing before the first anomaly of a rank, a line for each part that has failed by then.

    A fault of a later batch cannot concern it. One of an unknown batch can: it is counted as an earlier one.
    """
    last = rank.anomalies[0].where.page if rank.anomalies else -1
    by_part: dict[str, Fault] = {}
    for fault in sorted(that_cost_frames(rank.faults), key=lambda fault: (fault.where.page, fault.where.time_ns)):
        if fault.where.page <= last or last < 0:
            by_part.setdefault(fault.part, fault)
    return [
        f"rank {rank.rank}: gpuwatch's own {fault.part} has failed {_since(fault)} ({fault.message}): "
        "what was not recorded since may be where the value was made"
        for fault in by_part.values()
    ]


def _since(fault: Fault) -> str:
    return f"in batch {fault.where.batch}" if fault.where.page >= 0 else "before its first batch, or at an unknown time"
