"""What a rank did not record, by faults of gpuwatch's own or in a second thread: it may hold the maker. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...core.recorder.faults import costs_frames
from ...core.records import Fault
from ..facts.facts import RankFacts


def that_cost_frames(faults: Iterable[Fault]) -> list[Fault]:
    """The faults after which frames may be missing."""
    return [fault for fault in faults if costs_frames(fault.part)]


def lost_faults(rank: RankFacts) -> int:
    """How many more faults that cost frames a rank has counted than were heard: its log had no room for them."""
    counted = rank.state.faults if rank.state is not None else 0
    return max(0, counted - len(that_cost_frames(rank.faults)))


def was_not_watched(rank: RankFacts) -> bool:
    """Whether a rank has run, and had no recorder or no hooks."""
    if rank.state is not None:
        return rank.state.hooks == "failed"
    return rank.exit is not None and rank.exit.phase in ("starting", "unwatched")


def doubts_about(rank: RankFacts) -> list[str]:
    """What may be missing before the first anomaly of a rank, a line for each part that has failed by then.

    A fault of a later batch cannot concern it. One of an unknown batch can: it is counted as an earlier one. So is one
    that was counted and whose record was lost.
    """
    last = rank.anomalies[0].where.page if rank.anomalies else -1
    by_part: dict[str, Fault] = {}
    for fault in sorted(that_cost_frames(rank.faults), key=lambda fault: (fault.where.page, fault.where.time_ns)):
        if fault.where.page <= last or last < 0:
            by_part.setdefault(fault.part, fault)
    lost = lost_faults(rank)
    failed = [f"{fault.part} has failed {_since(fault)} ({fault.message})" for fault in by_part.values()]
    if lost:
        failed.append(
            f"parts have failed {lost} time{'s' if lost != 1 else ''} more, its log had no room to tell where"
        )
    return [
        *(
            f"rank {rank.rank}: gpuwatch's own {text}: what was not recorded since may be where the value was made"
            for text in failed
        ),
        *_unrecorded(rank, last),
    ]


def _unrecorded(rank: RankFacts, last: int) -> Iterator[str]:
    """A line about each time in which nothing was recorded, if it had begun by the page of the anomaly."""
    state = rank.state
    if state is None:
        return
    for count, first, line in (
        (
            state.calls_left_out,
            state.left_out_page,
            "a thread called modules while another thread was in a forward; such calls are not recorded, and one may "
            "have made the value",
        ),
        (
            state.hooks_gone,
            state.gone_page,
            "the script, or a library, had cleared torch's global hooks, gpuwatch's with them; what ran until they "
            "were put back is not recorded, and may have made the value",
        ),
    ):
        if count and not 0 <= last < first:
            yield f"rank {rank.rank}: {line}"


def _since(fault: Fault) -> str:
    return f"in batch {fault.where.batch}" if fault.where.page >= 0 else "before its first batch, or at an unknown time"
