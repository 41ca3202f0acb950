"""When it was that the verdict is about. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ...facts.facts import NodeFacts, RankFacts, RunFacts
from ..verdict_model import Verdict


@dataclass(frozen=True)
class EventTime:
    """By the collector's clock, as far as a node's distance from it is known."""

    time_ns: int
    text: str
    """`the overflow`"""


def event_of(facts: RunFacts, verdict: Verdict) -> EventTime | None:
    """None where nothing happened, or it is not known when."""
    if verdict.kind == "interrupted":
        signals = [(node, node.signal.time_ns) for node in facts.nodes.values() if node.signal is not None]
        return min((_at(node, ns, "the signal") for node, ns in signals if ns), key=_time, default=None)
    attempt = verdict.attempt if verdict.attempt is not None else facts.last_attempt
    ranks = facts.of_attempt(attempt)
    named = [rank for rank in ranks if rank.rank == verdict.rank]
    for some in (named, ranks):
        found = [event for rank in some if (event := _of_rank(facts, rank, verdict.kind)) is not None]
        if found:
            return min(found, key=_time)
    return None


def offset_ns(node: NodeFacts | None) -> int:
    """By how much the collector's clock is ahead of a node's; 0 if that is not known."""
    return node.clock[0] if node is not None and node.clock is not None else 0


def _of_rank(facts: RunFacts, rank: RankFacts, kind: str) -> EventTime | None:
    node = facts.nodes.get(rank.agent)
    if kind == "overflow" and rank.anomalies and rank.anomalies[0].where.time_ns:
        return _at(node, rank.anomalies[0].where.time_ns, "the overflow")
    if kind == "hang" and rank.looks and rank.looks[-1].where.time_ns:
        look = rank.looks[-1]
        return _at(node, look.where.time_ns - round(look.still_s * 1e9), "the stall")
    if kind in ("crash", "lost", "hang"):
        if rank.errors and rank.errors[0].where.time_ns:
            return _at(node, rank.errors[0].where.time_ns, "the exception")
        if rank.exit is not None and rank.exit.ended_ns:
            return _at(node, rank.exit.ended_ns, f"the end of rank {rank.rank}")
    return None


def _at(node: NodeFacts | None, time_ns: int, text: str) -> EventTime:
    return EventTime(time_ns + offset_ns(node), text)


def _time(event: EventTime) -> int:
    return event.time_ns
