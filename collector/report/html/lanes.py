"""The timeline as lanes, one for each rank: who met something first, and who ended because of it.

Time runs in the order that the collectives give. It has no scale: clocks of different hosts are not compared.
"""

from __future__ import annotations

from typing import NamedTuple

from ....core.identity import rank_name
from ..model import RunReport, TimelineEntry

_MOST_LANES = 24
_LEFT, _WIDTH, _TOP, _HEIGHT = 112, 900, 18, 22
SHAPES = {"anomaly": "cross", "raised": "triangle", "ended": "square", "fault": "circle"}
"""Kind of an event -> its shape; other events are in the table alone."""


class LaneEvent(NamedTuple):
    """One event of a rank."""

    x: float
    shape: str
    title: str


class RankLane(NamedTuple):
    """One rank."""

    rank: int
    name: str
    y: int
    end: float
    named: bool
    events: list[LaneEvent]


class TimelineLanes(NamedTuple):
    """What the template draws."""

    lanes: list[RankLane]
    left: int
    width: int
    height: int
    ticks: list[tuple[float, str]]
    """(x, collectives issued)"""
    left_out: int


def lanes(report: RunReport) -> TimelineLanes | None:
    """None where nothing happened that has a shape."""
    attempt = report.verdict.attempt if report.verdict.attempt is not None else report.run.attempts - 1
    events = [e for e in report.timeline if e.attempt == attempt and e.rank is not None and e.kind in SHAPES]
    if not any(event.kind != "ended" for event in events):
        return None
    ranks = _ranks(report, events)
    last: dict[int | None, int] = {}
    for event in events:
        last[event.rank] = max(last.get(event.rank, -1), _seq(event))
    kept = [event for event in events if event.rank in set(ranks)]
    moments = sorted({_moment(event, last) for event in kept})
    wide = (_WIDTH - _LEFT - 30) / max(1, len(moments))
    place = {moment: round(_LEFT + wide * (n + 0.5), 1) for n, moment in enumerate(moments)}
    found = []
    for n, rank in enumerate(ranks):
        mine = [LaneEvent(place[_moment(e, last)], SHAPES[e.kind], _title(e)) for e in kept if e.rank == rank]
        end = max((event.x for event in mine), default=float(_LEFT))
        found.append(RankLane(rank, rank_name(rank), _TOP + n * _HEIGHT, end, rank == report.named, mine))
    collectives = sorted({moment[0] for moment in moments})
    ticks = [
        (place[min(moment for moment in moments if moment[0] == seq)], str(seq) if seq >= 0 else "none")
        for seq in collectives[:: max(1, len(collectives) // 10)]
    ]
    others = len({event.rank for event in events}) - len(ranks)
    return TimelineLanes(found, _LEFT, _WIDTH, _TOP + len(found) * _HEIGHT + 26, ticks, others)


def _seq(event: TimelineEntry) -> int:
    return event.seq if event.seq is not None else -1


def _moment(event: TimelineEntry, last: dict[int | None, int]) -> tuple[int, int]:
    """Between two collectives a rank first meets something, then raises; its end comes after all of its events."""
    at = last[event.rank] if event.kind == "ended" else _seq(event)
    return at, ("fault", "anomaly", "raised", "ended").index(event.kind)


def _ranks(report: RunReport, events: list[TimelineEntry]) -> list[int]:
    met = [event.rank for event in events if event.kind != "ended"]
    named = [report.named]
    order = dict.fromkeys(rank for rank in [*named, *met, *(event.rank for event in events)] if rank is not None)
    return list(order)[:_MOST_LANES]


def _title(event: TimelineEntry) -> str:
    who = rank_name(event.rank) if event.rank is not None else "the node"
    return f"{who}, after {event.seq} collectives: {event.what}"
