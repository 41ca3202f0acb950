"""The verdict of a job that stood still to its end."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from msgspec import structs

from ...core.codes import VerdictKind
from ...core.events.agent_events import RankLook
from ...core.recorder.operation_mismatch import standing_at
from ...core.text import ranks_text
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..facts.words import cascade_of, doing, first_line, whose
from ..report.verdict import ConcurrentOrigin, Verdict
from .end_positions import STILL_S, last_look, outlasted_its_group
from .ending_order import signals_of, was_signalled
from .hang_finding import find_hang, missed_reduction
from .hang_groups import find_by_groups
from .hang_model import BACKWARD, HangFinding, Kind, RankPosition, position_of
from .pending_operations import begun_in
from .silent_nodes import SILENT, ranks_by_host, with_silent_nodes
from .teardown_verdict import handled_lines

_T = TypeVar("_T")

_LEAVES_S = 5.0
"""A rank whose script has ended takes so long to exit on a busy machine."""


def hang_verdict(facts: RunFacts, attempt: int | None = None) -> Verdict | None:
    """None if no rank had stalled, if one has moved since, or if what the others waited for has given its own reason.

    `attempt`: by default the last one; one before it has not gone well.
    """
    ranks = facts.of_attempt(facts.last_attempt if attempt is None else attempt)
    number = max((look.number for rank in ranks for look in rank.looks), default=0)
    looks = {rank.rank: look for rank in ranks for look in rank.looks if look.number == number}
    went_well = attempt in (None, facts.last_attempt) and all(node.went_well for node in facts.nodes.values())
    if not looks or went_well:
        return None
    # a rank that was not asked had ended by then
    early = {r.rank: r.exit for r in ranks if r.exit is not None and r.exit.by == "itself" and r.rank not in looks}
    found = find_hang(list(looks.values()), early, len(ranks))
    if found is None:
        return None
    absent = [rank for rank in ranks if rank.rank in found.ranks]
    moved = [rank for rank in ranks if rank.rank in looks and _moved_since(rank, looks[rank.rank])]
    if any(rank in absent or not _went_on_alone(looks[rank.rank], absent) for rank in moved):
        return None
    silent = ranks_by_host(
        (node.name, [r.rank for r in ranks if r.agent == node.agent]) for node in facts.nodes.values() if node.lost
    )
    found = with_silent_nodes(found, silent, list(looks.values()), len(early), len(ranks))
    if found.cause == SILENT:
        return structs.replace(verdict_of(facts, found, ranks, looks, VerdictKind.LOST), host=", ".join(sorted(silent)))
    signals = signals_of(facts)
    rested_s, leave = _rested_s(ranks, looks), found.cause == "does not end"
    if signals and (leave or not found.ranks) and rested_s < STILL_S:  # it came while they were asked
        return None
    if leave and rested_s < _LEAVES_S:
        return None
    # one that has ended since, and not by a signal, was slow
    slow = [r.rank for r in ranks if r.code is not None and r.code >= 0 and not was_signalled(r, signals)]
    if leave and set(found.ranks) & set(slow):
        return None
    left = [rank for rank in ranks if rank.rank not in early and not was_signalled(rank, signals)]
    if any(_says_why(rank, waited=rank.rank not in found.ranks) for rank in left):
        return None
    if not found.ranks and attempt in (None, facts.last_attempt):  # those that waited may have given up before
        after = ended_verdict(facts)
        if after is not None and (after.rank is not None or after.concurrent):
            return after
    return verdict_of(facts, found, ranks, looks)


def _moved_since(rank: RankFacts, look: RankLook) -> bool:
    """Whether a rank has gone on after it was asked. How it was ended says nothing of that."""
    if rank.exit is None:
        return False
    before, where = look.where, rank.exit.where
    return (where.step, where.batch, where.seq) != (before.step, before.batch, before.seq)


def _went_on_alone(look: RankLook, absent: list[RankFacts]) -> bool:
    """Whether a rank that has moved since has not met those that it waited for: they never began that collective.

    NCCL's watchdog aborts the communicator, and a host that waits for its device then goes on for a moment.
    """
    place = standing_at(look.groups)
    if place is None or not absent or any(rank.exit is None for rank in absent):
        return False
    begun = [begun_in(rank.exit.groups, place[0]) for rank in absent if rank.exit is not None]
    return all(number is not None and 0 <= number < place[1] for number in begun)


def _rested_s(ranks: list[RankFacts], looks: dict[int, RankLook]) -> float:
    """For how long each of the ranks that were asked had rested at least when it was asked, or at its end."""
    ends = {rank.rank: rank.exit.still_s for rank in ranks if rank.exit is not None}
    return min(max(look.still_s, ends.get(rank, 0.0)) for rank, look in looks.items())


def _says_why(rank: RankFacts, *, waited: bool) -> bool:
    """Whether a rank ended for a reason of its own, which is then the verdict.

    A waiting rank that NCCL's watchdog ends, or in which a group's timeout raises, has no reason of its own.
    """
    if rank.error is not None:
        return not rank.error.peer_failure
    if waited and (rank.hid_a_peer_failure or rank.was_aborted or rank.was_faulted or outlasted_its_group(rank)):
        return False
    return bool(rank.own_code) or rank.exited_badly


def verdict_of(
    facts: RunFacts,
    found: HangFinding,
    ranks: list[RankFacts],
    looks: dict[int, RankLook],
    kind: VerdictKind = VerdictKind.HANG,
) -> Verdict:
    """What was found, as a verdict. Its place is what the ranks share that did not come, or else all of them."""
    named = next((rank for rank in ranks if rank.rank == found.rank), None)
    meant = [rank for rank in ranks if rank.rank in found.ranks + found.instead] if found.ranks else ranks
    stood = [at for rank in meant if (at := looks.get(rank.rank) or rank.exit) is not None]
    module, cls = _common((at.module, at.cls) for at in stood) or (None, None)
    batch = _common(at.where.batch for at in stood)
    return Verdict(
        kind,
        found.statement,
        found.certainty,
        **(whose(facts, named) if named is not None else {"rank": found.rank}),
        module=module,
        cls=cls,
        root=_common(at.where.root for at in stood) or None,
        phase=_common(at.phase for at in stood) or None,
        attempt=ranks[0].attempt,
        step=_common(at.where.step for at in stood),
        batch=batch if batch is not None and batch >= 0 else None,
        evidence=[*found.evidence, *handled_lines(rank for rank in ranks if rank.rank in found.ranks)],
        next=found.next,
        concurrent=[_concurrent(facts, rank, looks.get(rank.rank)) for rank in ranks if rank.rank in found.others],
        cascade=cascade_of(facts, ranks[0].attempt, {*found.ranks, *found.instead}),
    )


def _common(values: Iterable[_T]) -> _T | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _concurrent(facts: RunFacts, rank: RankFacts, look: RankLook | None) -> ConcurrentOrigin:
    module, cls = (look.module or "", look.cls or "") if look is not None else ("", "")
    return ConcurrentOrigin(rank.rank, module, cls, None, "", facts.host(rank), "did not come")


# The verdict of a job that ended because its ranks did not meet, before it was seen to stand still.
#
# A group's timeout raises on those that came, gloo aborts a rank that is sent another size than it expects, and a rank
# that leaves takes the connection from those that wait for it. None of these names who was at fault; the ranks' tables
# of their process groups can.

_IN_BACKWARD = "in _engine_run_backward"
"""In the traceback of what a backward raised."""
_TIMED_OUT = ("imed out", "imeout", "failed to pass monitoredBarrier")


def ended_verdict(facts: RunFacts) -> Verdict | None:
    """None if a rank ended for a reason of its own, if a signal ended the job, or if the tables lead to no rank."""
    if not facts.failed_by_itself:
        return None
    ranks = facts.of_attempt(facts.last_attempt)
    reducing = _in_reduction(ranks)
    positions = {rank.rank: _position(rank, rank.rank in reducing) for rank in ranks}
    shown = {rank: position for rank, position in positions.items() if position is not None}
    if len(shown) < len(ranks):
        return None
    raised = [(rank, rank.errors[0]) for rank in ranks if rank.errors]
    timed_out = any(words in error.message for _, error in raised for words in _TIMED_OUT)
    hidden = [rank for rank in ranks if rank.hid_a_peer_failure]
    aborted = [rank for rank in ranks if rank.was_aborted]
    if not raised and not hidden and not aborted:
        return None
    waited = "waited until the group's timeout" if timed_out else "waited"
    world_size = max((len(ranks), *(rank.counts.world_size for rank in ranks)))
    found = find_by_groups(shown, world_size, waited, over=True)
    if found is None and timed_out and len(shown) == world_size:
        found = _missed_the_reduction(sorted(reducing), shown, waited)
    if found is None or (found.cause not in ("mismatch", "left early") and not timed_out):
        return None
    lines = [
        *(f"rank {rank} was at {one.line}" for rank, one in sorted(shown.items()) if one.line),
        *(f"rank {rank.rank} raised {error.error}: {first_line(error.message)}" for rank, error in raised),
        *(f"rank {rank.rank} exited with an error code after a collective had raised in it" for rank in hidden),
        *(f"rank {rank.rank} was aborted by SIGABRT" for rank in aborted),
    ]
    found = replace(found, evidence=[*found.evidence, *lines])
    return verdict_of(facts, found, ranks, {}, VerdictKind.HANG if timed_out else VerdictKind.CRASH)


def _missed_the_reduction(waiting: list[int], shown: dict[int, RankPosition], waited: str) -> HangFinding | None:
    """Some waited in a backward's reduction, which no table describes, and others were elsewhere and behind."""
    away = [rank for rank, one in shown.items() if one.kind == "away"]
    if not waiting or not away or len(waiting) + len(away) < len(shown) or not _are_behind(away, waiting, shown):
        return None
    found = missed_reduction(shown, waiting, waited)
    return replace(found, evidence=[*found.evidence, *_counts(shown)])


def _are_behind(away: list[int], waiting: list[int], shown: dict[int, RankPosition]) -> bool:
    """Whether each of these has begun fewer collectives of a group than one that waits, as far as their tables show."""
    begun = {rank: {(g.name, g.members): g.begun for g in one.groups} for rank, one in shown.items()}
    return all(
        any(number < begun[other].get(group, 0) for group, number in begun[rank].items() for other in waiting)
        for rank in away
    )


def _counts(shown: dict[int, RankPosition]) -> list[str]:
    """`collectives begun in group 0: 9 by ranks 0, 2; 8 by rank 1`"""
    found: dict[str, dict[int, list[int]]] = {}
    for rank, one in sorted(shown.items()):
        for group in one.groups:
            found.setdefault(group.name, {}).setdefault(group.begun, []).append(rank)
    lines = []
    for name, by_number in found.items():
        counts = (f"{number} by {ranks_text(ranks)}" for number, ranks in sorted(by_number.items(), reverse=True))
        lines += [f"collectives begun in group {name}: {'; '.join(counts)}"] if len(by_number) > 1 else []
    return lines


def _in_reduction(ranks: list[RankFacts]) -> set[int]:
    """The ranks that waited in a backward for the gradients of others: they raised there, or were ended in a backward
    in which another one has raised. Without one that has raised there, a backward may be all computation."""
    errors = [(rank.rank, rank.error) for rank in ranks if rank.error is not None and rank.error.peer_failure]
    raised = {rank for rank, error in errors if _IN_BACKWARD in error.traceback}
    exits = [rank.exit for rank in ranks if rank.exit is not None and not rank.errors]
    ended = {exit_.where.rank for exit_ in exits if (exit_.by, exit_.phase) == ("torchrun", "backward")}
    return raised | ended if raised else set()


def _position(rank: RankFacts, reduces: bool) -> RankPosition | None:
    """None for a rank that ended for a reason of its own, or whose end is not known."""
    exit_, error = rank.exit, rank.error
    if exit_ is None or exit_.code is None or (error is not None and not error.peer_failure):
        return None
    failed = error is not None or rank.hid_a_peer_failure
    if rank.exited_badly and not failed:
        return None
    placed = standing_at(exit_.groups, failed=failed) is not None
    if not failed and exit_.by == "itself":
        if exit_.code == 0 or rank.was_aborted_at_exit:
            return RankPosition("left", groups=exit_.groups)
        if exit_.code != -signal.SIGABRT or not placed:
            return None
    look = last_look(rank)
    seen = position_of(look) if look is not None else None
    does = seen.what if seen is not None and seen.kind == "stopped" else doing(exit_)
    line = seen.line if seen is not None else ""
    operation = BACKWARD if reduces and (failed or not placed) else ""
    kind: Kind = "waits" if placed else "may wait" if failed or operation else "away"
    return RankPosition(kind, does, operation, line, groups=exit_.groups, failed=failed)
