"""What a rank did not record, by faults of gpuwatch's own or in a second thread: it may hold the maker. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.events.own_limits import OwnFault
from ..facts.rank_facts import RankFacts
from ..report.sentence_parts import counted


def doubts_about(rank: RankFacts) -> list[str]:
    """What may be missing before the first anomaly of a rank, a line for each part that has failed by then.

    A fault of a later batch cannot concern it. One of an unknown batch can: it is counted as an earlier one. So is one
    that was counted and whose record was lost.
    """
    last = rank.anomalies[0].where.page if rank.anomalies else -1
    by_part: dict[str, OwnFault] = {}
    for fault in sorted(rank.faults_that_cost_frames, key=lambda fault: (fault.where.page, fault.where.time_ns)):
        if fault.where.page <= last or last < 0:
            by_part.setdefault(fault.part, fault)
    failed = []
    for fault in by_part.values():
        since = (
            f"in batch {fault.where.batch}"
            if fault.where.page >= 0
            else "before its first batch, or at an unknown time"
        )
        failed.append(f"a part of gpuwatch failed {since} ({fault.part}: {fault.message})")
    if rank.lost_faults:
        failed.append(
            f"parts of gpuwatch failed {counted(rank.lost_faults, 'time')} more; its log had no room to record where"
        )
    return [
        *(f"rank {rank.rank}: {text}: the value may have been made in what was not recorded since" for text in failed),
        *_unrecorded(rank, last),
    ]


def _unrecorded(rank: RankFacts, last: int) -> Iterator[str]:
    """A line about each time in which nothing was recorded, if it had begun by the page of the anomaly."""
    state = rank.counts
    calls = "such calls are not recorded, and one may have made the value"
    ran = "what ran until they were restored is not recorded, and may have made the value"
    left_out = f"a thread called modules while another thread was in a forward; {calls}"
    gone = f"the script, or a library, had cleared torch's global hooks, including gpuwatch's; {ran}"
    for times, first, line in (
        (state.calls_left_out, state.left_out_page, left_out),
        (state.hooks_gone, state.gone_page, gone),
    ):
        if times and not 0 <= last < first:
            yield f"rank {rank.rank}: {line}"
