"""An overflow that is known while no rank moves any more: it comes before the hang. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ...core.codes import Certainty
from ...core.frames import FramePhase
from ...core.judge import PageSoFar
from ...core.roles import GRADIENTS, RoleKind, parse_role
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..report.verdict import Verdict

_BATCHES_BEFORE = 1
"""A hang of a later batch than the next is one of its own: the job trained on after the overflow."""


class RestingOverflow(NamedTuple):
    """What is known of an overflow of the batch in which the ranks stand."""

    attempt: int
    statement: str
    ends: bool
    """Its rank would end the job for it, if it moved."""


def overflow_at_rest(facts: RunFacts, verdict: Verdict | None) -> RestingOverflow | None:
    """`verdict` is that over an overflow so far. None if it names no rank, or the overflow was long before."""
    if verdict is None or verdict.certainty == Certainty.UNKNOWN:
        return None
    rank = facts.named(verdict.attempt, verdict.rank)
    if rank is None or not rank.anomalies:
        return None
    first = rank.anomalies[0]
    if rank.counts.batch - first.where.batch > _BATCHES_BEFORE:
        return None
    return RestingOverflow(first.where.attempt, verdict.statement, first.aborts or _is_decided(rank))


def _is_decided(rank: RankFacts) -> bool:
    """Whether nothing that the rank does later can take away an alarm that was seen in its pages.

    A weight may turn out to get no gradient, and what a model returns that is not trained leads nowhere.
    """
    first = rank.anomalies[0]
    page = rank.pages.get(first.where.page)
    kind = parse_role(first.role).kind
    if page is None or not (kind in GRADIENTS or (kind is RoleKind.OUTPUT and first.phase == FramePhase.FORWARD)):
        return False
    so_far = PageSoFar()
    for frame in sorted(page.frames, key=lambda frame: frame.index):
        found = so_far.judge(frame)
        if found.alarm is not None:
            at = found.of or frame
            return (at.index, found.alarm.role) == (first.frame, first.role) and page.has_gradients
    return False
