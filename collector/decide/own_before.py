"""Whether a rank's bad value is its own although it has issued collectives since the last finite one. Pure.

Scripts sum their loss over the ranks to print it, before its backward. Such a collective has brought the value only if
something bad came out of it that this rank had not put in itself:

rank 1 put nan in                  nan came out    its own: it was bad before
rank 1 put finite numbers in       finite          its own: whatever was made of that, it was made here
rank 1 put finite numbers in       nan came out    unknown
not known, or not read                             unknown

The rank's own list of its last collectives shows that none is missing: only what was not finite is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...core.events.across_ranks import MOST_PASSED, MOST_PASSED_ALIKE, PassedTensor
from ...core.events.alarms import Anomaly, IssuedMoment, NotedCollective
from ...core.recorder.group_table import members_of
from ..facts.diagnosis import LocalDiagnosis
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..report.sentence_parts import counted, ranks_text

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_PICKLED = "uint8"
"""Object collectives pass numbers as bytes, in which no nan is seen."""


def ranks_of(one: PassedTensor) -> list[int]:
    """The ranks of its process group."""
    return members_of(one.members, most=1 << 16)


def way_text(one: PassedTensor) -> str:
    """`all_reduce 7 of process group 0`, `message 3 from rank 0 to rank 1`."""
    if one.operation == "send":
        return f"message {one.number} from rank {one.where.rank} to rank {one.peer}"
    if one.operation == "recv":
        return f"message {one.number} from rank {one.peer} to rank {one.where.rank}"
    return f"{one.operation} {one.number} of process group {one.group} ({ranks_text(ranks_of(one))})"


@dataclass(frozen=True)
class OwnBefore:
    """What shows that nothing has brought a rank its bad value."""

    puts: tuple[PassedTensor, ...]
    """Bad values that it has put into collectives itself."""
    line: str


def own_between(facts: RunFacts, found: LocalDiagnosis, last: int, now: int) -> OwnBefore | None:
    """From where a rank had issued `last` operations, and all that it showed was finite, to `now`; None if unknown."""
    rank = facts.one(found.attempt, found.rank)
    alarm = rank.anomalies[0] if rank.anomalies else None
    if alarm is None or (alarm.where.step, alarm.where.batch) != (found.step, found.batch):
        return None
    between = _numbers_between(_moment_at(alarm, found, max(last, 0)), _moment_at(alarm, found, now))
    if between is None or len(between) != now - max(last, 0) or rank.counts.passed_unseen or _may_have_more(rank):
        return None
    noted = {(one.group, one.number): one for one in alarm.collectives_before}
    puts: list[PassedTensor] = []
    for key in between:
        told = [one for one in rank.passed if (one.group, one.number) == key and last <= one.where.seq <= now]
        told = [one for one in told if one.operation not in ("send", "recv")]
        given = [one for one in told if not one.came_out]
        came = [one for one in told if one.came_out]
        if not (_is_its_own(facts, came[0]) if came else _was_finite(noted.get(key))):
            return None
        puts += given
    return OwnBefore(tuple(puts), _line(found.rank, len(between), puts))


def _line(rank: int, number: int, puts: list[PassedTensor]) -> str:
    if puts:
        return f"rank {rank} itself put {puts[0].value} into {way_text(puts[0])}: its value was bad before that"
    issued = f"{counted(number, 'collective')} after its last finite frame"
    return f"rank {rank} issued {issued}, and finite numbers came out: none has brought it the value"


def _moment_at(alarm: Anomaly, found: LocalDiagnosis, seq: int) -> IssuedMoment | None:
    known = [IssuedMoment(0), found.issued, *alarm.moments]
    return next((one for one in known if one.seq == seq and (one.clock or seq == 0)), None)


def _numbers_between(last: IssuedMoment | None, now: IssuedMoment | None) -> list[tuple[str, int]] | None:
    """(group, number) of each collective that was issued in between; None if messages were, too, or it is unknown."""
    if last is None or now is None or (last.sent, last.received) != (now.sent, now.received):
        return None
    return [
        (group, number)
        for group, count in now.clock.items()
        for number in range(max(last.clock.get(group, 0), 0) + 1, count + 1)
    ]


def _may_have_more(rank: RankFacts) -> bool:
    kinds = Counter((one.operation, one.group, one.peer, one.came_out, one.dtype, one.elements) for one in rank.passed)
    return len(rank.passed) >= MOST_PASSED or max(kinds.values(), default=0) >= MOST_PASSED_ALIKE


def _was_finite(one: NotedCollective | None) -> bool:
    """Whether what came out was read: then it was finite, or the rank would have reported it."""
    if one is None or not one.operation:
        return False
    return one.operation == "barrier" or (one.was_read and one.dtype not in ("", _PICKLED))


def _is_its_own(facts: RunFacts, came: PassedTensor) -> bool:
    """Whether the rank had put in something bad, and of the others none had, or the operation adds up all of it."""
    if came.given != "not finite":
        return False
    return came.operation in REDUCTIONS or not any(_others_put(facts, came))


def _others_put(facts: RunFacts, came: PassedTensor) -> Iterator[PassedTensor]:
    for rank in ranks_of(came):
        other = facts.ranks.get((came.where.attempt, rank))
        if rank != came.where.rank and other is not None:
            yield from (one for one in other.passed if _is_same(one, came) and one.given == "not finite")


def _is_same(one: PassedTensor, other: PassedTensor) -> bool:
    return (one.operation, one.group, one.number) == (other.operation, other.group, other.number)


def without_fed(facts: RunFacts, level: list[LocalDiagnosis]) -> list[LocalDiagnosis]:
    """The diagnoses without those of ranks that may have got the value from another one's, which put it in.

    That other one is then less sure: who got it may have made one of its own as well.
    """
    left: list[LocalDiagnosis] = []
    notes: dict[int, list[str]] = {}
    for one in level:
        put = next(
            (
                put
                for other in level
                if one.passage.passed
                for put in other.passage.puts
                if _was_brought(facts, one, put)
            ),
            None,
        )
        if put is None:
            left.append(one)
        else:
            notes.setdefault(put.where.rank, []).append(
                f"rank {one.rank} met {one.row.value} after that had come out of {way_text(put)}: it may have got it "
                "there"
            )
    return [
        replace(one, sure=False, notes=(*one.notes, *notes[one.rank])) if one.rank in notes else one for one in left
    ]


def _was_brought(facts: RunFacts, one: LocalDiagnosis, put: PassedTensor) -> bool:
    """Whether that came out on this rank, which had put in nothing bad, at the latest when its value was seen."""
    passed = facts.one(one.attempt, one.rank).passed
    came = [each for each in passed if each.came_out and _is_same(each, put)]
    return any(each.given != "not finite" and each.where.seq <= one.issued.seq for each in came)
