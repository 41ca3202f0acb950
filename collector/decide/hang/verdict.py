"""The verdict of a job that stood still to its end."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import TypeVar

from ....core.records import RankLook, WorkerExit
from ...facts.facts import RankFacts, RunFacts
from ..verdict_model import Concurrent, Verdict
from ..words import cascade_of, device_of, hid_a_peer_failure, own_error
from .finding import find_hang
from .hang_finding import HangFinding

_T = TypeVar("_T")


def hang_verdict(facts: RunFacts, attempt: int | None = None) -> Verdict | None:
    """None if no rank had stalled, if one has moved since, or if what the others waited for has told its own reason.

    `attempt`: by default the last one; one before it has not gone well.
    """
    ranks = facts.of_attempt(facts.last_attempt if attempt is None else attempt)
    looks = last_looks(ranks)
    if (
        not looks
        or (attempt in (None, facts.last_attempt) and _job_went_well(facts))
        or any(_moved_since(rank, looks[rank.rank]) for rank in ranks if rank.rank in looks)
    ):
        return None
    early = {rank.rank: rank.exit for rank in ranks if rank.exit is not None and _ended_before(rank.exit, looks)}
    found = find_hang(list(looks.values()), early, len(ranks))
    if found is None:
        return None
    absent = {found.rank, *found.others}
    if found.cause == "does not end" and any(_has_ended(rank) for rank in ranks if rank.rank in absent):
        return None
    if any(_says_why(rank, waited=rank.rank not in absent) for rank in ranks if rank.rank not in early):
        return None
    return verdict_of(facts, found, ranks, looks)


def last_looks(ranks: list[RankFacts]) -> dict[int, RankLook]:
    """rank -> where it stood when the ranks were asked for the last time."""
    number = max((look.number for rank in ranks for look in rank.looks), default=0)
    return {rank.rank: look for rank in ranks for look in rank.looks if look.number == number}


def _job_went_well(facts: RunFacts) -> bool:
    return all(node.bye is not None and node.bye.outcome == "ok" for node in facts.nodes.values())


def _moved_since(rank: RankFacts, look: RankLook) -> bool:
    """Whether a rank has gone on after it was asked. How it was ended says nothing of that."""
    where = rank.exit.where if rank.exit is not None else None
    if where is None:
        return False
    before = look.where
    return (where.step, where.batch, where.seq) != (before.step, before.batch, before.seq)


def _ended_before(exit_: WorkerExit, looks: dict[int, RankLook]) -> bool:
    """A rank that was not asked had ended by then."""
    return exit_.where.rank not in looks and exit_.by == "itself"


def _has_ended(rank: RankFacts) -> bool:
    """Whether a rank that had not ended when it was asked has ended after that, and not by a signal: it was slow."""
    return rank.exit is not None and rank.exit.code is not None and rank.exit.code >= 0


def _says_why(rank: RankFacts, *, waited: bool) -> bool:
    """Whether a rank ended for a reason of its own, which is then the verdict.

    Of those that waited, the watchdog of NCCL aborts the process, and a group's timeout raises: that is no reason.
    """
    error = own_error(rank)
    if error is not None:
        return not error.peer_failure
    if waited and hid_a_peer_failure(rank):
        return False
    code = rank.exit.code if rank.exit is not None and rank.exit.by == "itself" else None
    return code not in (None, 0, -signal.SIGABRT) if waited else code not in (None, 0)


def verdict_of(
    facts: RunFacts, found: HangFinding, ranks: list[RankFacts], looks: dict[int, RankLook], kind: str = "hang"
) -> Verdict:
    """What was found, as a verdict. Its place is what the ranks share that did not come, or else all of them."""
    named = next((rank for rank in ranks if rank.rank == found.rank), None)
    absent = {found.rank, *found.others} - {None}
    meant = [rank for rank in ranks if rank.rank in absent] if absent else ranks
    stood = [at for rank in meant if (at := looks.get(rank.rank) or rank.exit) is not None]
    module, cls = _common((at.module, at.cls) for at in stood) or (None, None)
    batch = _common(at.where.batch for at in stood)
    return Verdict(
        kind=kind,
        statement=found.statement,
        certainty=found.certainty,
        rank=found.rank,
        host=(facts.host(named) or None) if named is not None else None,
        device=device_of(named) if named is not None else None,
        module=module,
        cls=cls,
        root=_common(at.where.root for at in stood) or None,
        phase=_common(at.phase for at in stood) or None,
        attempt=ranks[0].attempt,
        step=_common(at.where.step for at in stood),
        batch=batch if batch is not None and batch >= 0 else None,
        evidence=found.evidence,
        next=found.next,
        concurrent=[_concurrent(facts, rank, looks.get(rank.rank)) for rank in ranks if rank.rank in found.others],
        cascade=cascade_of(facts, ranks[0].attempt, {rank for rank in (found.rank, *found.others) if rank is not None}),
    )


def _common(values: Iterable[_T]) -> _T | None:
    """What they all are; None where they differ, or there are none."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _concurrent(facts: RunFacts, rank: RankFacts, look: RankLook | None) -> Concurrent:
    module = look.module if look is not None and look.module is not None else ""
    return Concurrent(
        rank.rank, module, look.cls or "" if look is not None else "", None, "", facts.host(rank), "did not come"
    )
