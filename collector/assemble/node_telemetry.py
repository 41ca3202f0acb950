"""report.json's `telemetry`: how the nodes did around the event, and what stands out in it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy
from msgspec.structs import replace

from ...core.metrics import METRICS
from ...core.verdicts import VerdictKind
from ..facts.facts import NodeFacts, RankFacts, RunFacts
from ..report.model import FigureSeries, NodeFigures, TelemetryReport, UnusualFigure, Verdict
from .node_series import FigureSamples, NodeSeries, node_series
from .stands_out import stands_out

# When it was that the verdict is about. Pure.


@dataclass(frozen=True)
class EventTime:
    """By the collector's clock, as far as a node's distance from it is known."""

    time_ns: int
    text: str
    """`the overflow`"""


def event_of(facts: RunFacts, verdict: Verdict) -> EventTime | None:
    """None where nothing happened, or it is not known when."""
    if verdict.kind == VerdictKind.INTERRUPTED:
        signals = [(node, node.signal.time_ns) for node in facts.nodes.values() if node.signal is not None]
        return min((_event_at(node, ns, "the signal") for node, ns in signals if ns), key=_time, default=None)
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


def _of_rank(facts: RunFacts, rank: RankFacts, kind: VerdictKind) -> EventTime | None:
    node = facts.nodes.get(rank.agent)
    if kind == VerdictKind.OVERFLOW and rank.anomalies and rank.anomalies[0].where.time_ns:
        return _event_at(node, rank.anomalies[0].where.time_ns, "the overflow")
    if kind == VerdictKind.HANG and rank.looks and rank.looks[-1].where.time_ns:
        look = rank.looks[-1]
        return _event_at(node, look.where.time_ns - round(look.still_s * 1e9), "the stall")
    if kind in (VerdictKind.CRASH, VerdictKind.LOST, VerdictKind.HANG):
        if rank.errors and rank.errors[0].where.time_ns:
            return _event_at(node, rank.errors[0].where.time_ns, "the exception")
        if rank.exit is not None and rank.exit.ended_ns:
            return _event_at(node, rank.exit.ended_ns, f"the end of rank {rank.rank}")
    return None


def _event_at(node: NodeFacts | None, time_ns: int, text: str) -> EventTime:
    return EventTime(time_ns + offset_ns(node), text)


def _time(event: EventTime) -> int:
    return event.time_ns


MOST_NODES = 4
"""Whose figures are in the report. Of all nodes it is told what stands out."""
MOST_ALIKE = 4
"""Of a figure that stands out on many nodes, so many are told one by one."""
MOST_POINTS = 48
SHOWN_BEFORE_S, SHOWN_AFTER_S = 300.0, 60.0
"""Around the event."""
_EVERYTHING_S = 1e18


def telemetry_report(facts: RunFacts, verdict: Verdict) -> TelemetryReport | None:
    """None if no node has sent any. If it cannot be told, everything else in the report is there all the same."""
    try:
        return _telemetry_report(facts, verdict)
    except Exception as error:  # it is made of what came over the network
        return TelemetryReport(trouble=f"the nodes' figures could not be told: {type(error).__name__}: {error}")


def series_of_all(facts: RunFacts, zero_ns: int | None) -> dict[str, NodeSeries]:
    """By agent. `zero_ns` is by the collector's clock; None: each node's own last message."""
    found = {}
    for agent, node in facts.nodes.items():
        if not node.telemetry:
            continue
        zero = max(message.sent_ns for message in node.telemetry.values())
        if zero_ns is not None:
            zero = zero_ns - offset_ns(node)
        host = node.hello.host if node.hello is not None else ""
        series = node_series(host, node.telemetry.values(), zero)
        if series is not None:
            found[agent] = series
    return found


def _telemetry_report(facts: RunFacts, verdict: Verdict) -> TelemetryReport | None:
    if not any(node.telemetry for node in facts.nodes.values()):
        return None
    event = event_of(facts, verdict)
    nodes = series_of_all(facts, event.time_ns if event is not None else None)
    named = facts.ranks.get((verdict.attempt or 0, -1 if verdict.rank is None else verdict.rank))
    agents = sorted(nodes, key=lambda agent: named is None or agent != named.agent)
    notable = [each for agent in agents for each in (stands_out(nodes[agent], event.text) if event is not None else [])]
    notable = _alike_counted(notable)
    notable_hosts = {each.host for each in notable}
    order = sorted(
        agents, key=lambda agent: (named is None or agent != named.agent, nodes[agent].host not in notable_hosts)
    )
    shown = [_figures(nodes[agent], with_event=event is not None) for agent in order[:MOST_NODES]]
    when = datetime.fromtimestamp(event.time_ns / 1e9, timezone.utc) if event is not None else None
    return TelemetryReport(
        event.text if event is not None else "",
        when.isoformat(timespec="seconds").replace("+00:00", "Z") if when is not None else None,
        notable,
        shown,
        len(order) - len(shown),
    )


def _alike_counted(notable: list[UnusualFigure]) -> list[UnusualFigure]:
    hosts: dict[str, dict[str, int]] = {}
    kept = []
    for each in notable:
        on = hosts.setdefault(each.what, {})
        on[each.host] = on.get(each.host, 0) + 1
        if len(on) <= MOST_ALIKE and on[each.host] <= MOST_ALIKE:
            kept.append(each)
    return [replace(each, alike=len(hosts[each.what]) - 1) for each in kept]


def _figures(node: NodeSeries, *, with_event: bool) -> NodeFigures:
    first, last = (-SHOWN_BEFORE_S, SHOWN_AFTER_S) if with_event else (-_EVERYTHING_S, _EVERYTHING_S)
    around = node.within(first, last)
    known = {name: series for name in around.names if (series := around.get(*name)) is not None}
    times = numpy.unique(numpy.concatenate([numpy.zeros(0), *(series.at_s for series in known.values())]))
    ends = [part[-1] for part in numpy.array_split(times, MOST_POINTS) if len(part)]
    figures = []
    for (of, what), series in known.items():
        values = _at(series, ends)
        if any(values):  # of most errors there are none
            metric = METRICS.get(what)
            text, unit = (metric.text, metric.unit) if metric is not None else (what, "")
            figures.append(FigureSeries(of, what, text, unit, values))
    return NodeFigures(node.host, [round(float(end), 1) for end in ends], figures, node.troubles)


def _at(series: FigureSamples, ends: list[Any]) -> list[float | None]:
    """The mean of what was there up to each of these times since the one before; a count's growth in a second."""
    place = numpy.searchsorted(ends, series.at_s)
    known = numpy.isfinite(series.values)
    sums = numpy.bincount(place[known], series.values[known], len(ends))
    over = series.over_s[known] if series.counts else numpy.ones(int(known.sum()))
    weights = numpy.bincount(place[known], over, len(ends))
    return [float(f"{total / weight:.4g}") if weight > 0 else None for total, weight in zip(sums, weights, strict=True)]
