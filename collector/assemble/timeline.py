"""What happened over time: events in the order that the run itself gives them, forecasts, and telemetry as series."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy

from ...core.codes import VerdictKind
from ...core.events.agent_events import LimitForecast
from ...core.frames import format_number, module_text
from ...core.signal_errors import from_outside
from ...core.wire.columns import is_count, unpack_samples
from ...core.wire.messages import TelemetryMessage
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import NodeFacts, RunFacts
from ..facts.words import end_text
from ..report.model import TimelineEntry
from ..report.run_figures import ModuleForecast
from ..report.sentence_parts import grouped
from ..report.verdict import Verdict


def utc(seconds: float | None, to: str = "seconds") -> str | None:
    """ISO 8601, rounded down to "seconds" or "milliseconds"."""
    if not seconds:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec=to).replace("+00:00", "Z")


def timeline_of(facts: RunFacts) -> list[TimelineEntry]:
    """Events by attempt and number of collectives; at the same number, by each host's own clock."""
    found: list[tuple[tuple[int, int, bool, str, int], TimelineEntry]] = []
    for rank in facts.everyone.values():
        events: list[tuple[Any, str, str]] = [
            (a, "anomaly", f"{a.value} in {a.role} of {module_text(a.module, a.cls)}") for a in rank.anomalies
        ]
        events += [(e, "raised", f"raised {e.error}") for e in rank.errors]
        events += [(f, "fault", f"gpuwatch's own fault: {f.part}: {f.message}") for f in rank.faults]
        if rank.preflight is not None:
            events.append((rank.preflight, "preflight", f"preflight {rank.preflight.outcome}"))
        if rank.exit is not None:
            events.append((rank.exit, "ended", end_text(rank, rank.exit, facts.starter)))
        for event, kind, text in events:
            at = event.where
            time = utc(at.time_ns / 1e9)
            entry = TimelineEntry(time, rank.rank, at.attempt, text, at.step, at.batch, at.collectives, kind)
            found.append(((at.attempt, at.collectives, event is rank.exit, time or "~", rank.rank), entry))
    entries = [entry for _, entry in sorted(found, key=lambda pair: pair[0])]
    for node in facts.nodes.values():
        if node.signal is not None:
            text = f"launch on {node.host} got signal {node.signal.signal}"
            entries.append(TimelineEntry(utc(node.signal.time_ns / 1e9), None, facts.last_attempt, text, kind="signal"))
    return entries


# Modules that were about to pass their dtype's limit, as the node agents saw it while the ranks ran.

_MOST_MODULES = 64


def forecasts_of(ranks: list[RankFacts]) -> list[ModuleForecast]:
    """By module, the earliest forecast first."""
    sound = (forecast for rank in ranks for forecast in rank.forecasts if is_sound(forecast))
    found = []
    for module, group in grouped(sound, lambda forecast: forecast.module).items():
        first = min(group, key=lambda forecast: (forecast.where.batch, forecast.after, forecast.where.rank))
        names = ("cls", "dtype", "limit", "after", "earliest", "latest", "since")
        fields: dict[str, Any] = {name: getattr(first, name) for name in names}
        fields |= {"rank": first.where.rank, "batch": first.where.batch, "abs_max": float(f"{first.abs_max:.3g}")}
        numbers = sorted({forecast.where.rank for forecast in group})
        found.append(ModuleForecast(module=module, ranks=numbers, **fields))
    return sorted(found, key=lambda each: (each.batch, -_depth(each.module), each.after, each.module))[:_MOST_MODULES]


def _depth(module: str) -> int:
    """A module stands before those around it, which return what it has returned."""
    return module.count(".") + (module != "")


def passing_text(told: ModuleForecast | LimitForecast) -> str:
    """`` `fc2` was at 4.10e+03 and would pass it in about 40 batches (30 to 60) ``"""
    name = f"`{told.module}`" if told.module else "the root"
    size = format_number(told.abs_max).strip()
    return f"{name} was at {size} and would pass it in about {told.after} batches ({told.earliest} to {told.latest})"


def limit_text(limit: float) -> str:
    """`65504`, `3.39e+38`"""
    return f"{limit:.0f}" if limit < 1e6 else format_number(limit).strip()


def is_sound(forecast: LimitForecast) -> bool:
    """Whether its numbers are finite and positive. They were received over the network and cannot be trusted."""
    return all(math.isfinite(number) and number > 0 for number in (forecast.limit, forecast.abs_max))


# The telemetry of nodes as series over time, zero being the event that the verdict is about. Pure.


@dataclass(frozen=True)
class EventTime:
    """By the collector's clock, as far as a node's distance from it is known."""

    time_ns: int
    text: str
    """`the overflow`"""


def event_of(facts: RunFacts, verdict: Verdict) -> EventTime | None:
    """None if nothing happened, or its time is unknown."""
    if verdict.kind == VerdictKind.INTERRUPTED:
        signals = [(node, node.signal.time_ns) for node in facts.nodes.values() if node.signal is not None]
        return _first(_event_at(node, ns, "the signal") for node, ns in signals if ns)
    attempt = verdict.attempt if verdict.attempt is not None else facts.last_attempt
    ranks = facts.of_attempt(attempt)
    named = [rank for rank in ranks if rank.rank == verdict.rank]
    found = (_first(filter(None, (_of_rank(facts, rank, verdict.kind) for rank in some))) for some in (named, ranks))
    return next(filter(None, found), None)


def _first(events: Iterable[EventTime]) -> EventTime | None:
    return min(events, key=lambda event: event.time_ns, default=None)


def offset_ns(node: NodeFacts | None) -> int:
    """By how much the collector's clock is ahead of a node's, in nanoseconds; 0 if unknown."""
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


def series_of_all(facts: RunFacts, zero_ns: int | None) -> dict[str, NodeSeries]:
    """By agent. `zero_ns` is by the collector's clock; None: each node's own last message."""
    found = {}
    for agent, node in facts.nodes.items():
        if not node.telemetry:
            continue
        zero = max(message.sent_ns for message in node.telemetry.values())
        if zero_ns is not None:
            zero = zero_ns - offset_ns(node)
        series = node_series(node.host, node.telemetry.values(), zero)
        if series is not None:
            found[agent] = series
    return found


_Part = tuple[Any, Any]
"""(seconds after the event, float64 values) of shape (samples,), nan where there is none."""
MOST_LIVES = 8
"""The newest agents of a node, whose figures are read."""


@dataclass(frozen=True)
class FigureSamples:
    """One figure. Arrays are float64 of shape (samples,), of those samples alone that have it."""

    at_s: Any
    values: Any
    """Gauges as sampled, counters as increments; nan if unknown."""
    over_s: Any
    """The seconds in which a count grew by its value."""
    counts: bool

    @property
    def shown(self) -> Any:
        """A level as it was, a count as its growth in a second."""
        return self.values / self.over_s if self.counts else self.values

    def within(self, first_s: float, last_s: float) -> FigureSamples:
        """That time only. The first sample of a count has grown from before it."""
        there = (self.at_s >= first_s) & (self.at_s <= last_s)
        return FigureSamples(self.at_s[there], self.values[there], self.over_s[there], self.counts)

    @property
    def share(self) -> float:
        """A count's growth in a second over all of it; nan if it is not known."""
        known = numpy.isfinite(self.values) & (self.over_s > 0)
        over_s = float(self.over_s[known].sum())
        return float(self.values[known].sum()) / over_s if over_s > 0 else float("nan")


class NodeSeries:
    """The series of one node, by (what it is of, a key of METRICS). Few are asked for; only those are made."""

    def __init__(self, host: str, troubles: list[str], columns: dict[tuple[str, str], list[_Part]]):
        """`columns`: of each series its parts, one for each life of the node's agent that has it."""
        self.host = host
        self.troubles = troubles
        self._columns = columns
        self._made: dict[tuple[str, str], FigureSamples] = {}
        self._span: tuple[float, float] | None = None

    @property
    def names(self) -> list[tuple[str, str]]:
        """(what it is of, a key of METRICS), of those with samples at that time or at another."""
        return list(self._columns)

    def get(self, of: str, what: str) -> FigureSamples | None:
        """One of them, if it has any sample."""
        if (of, what) not in self._columns:
            return None
        found = self._made.get((of, what))
        if found is None:
            parts = [_one(at_s, column, is_count(what)) for at_s, column in self._columns[of, what]]
            at_s, values, over_s = (numpy.concatenate(column) for column in zip(*parts, strict=True))
            found = self._made[of, what] = FigureSamples(at_s, values, over_s, is_count(what))
        if self._span is not None:
            found = found.within(*self._span)
        return found if len(found.at_s) else None

    def figures(self, facts: RunFacts) -> Iterator[tuple[str, str, FigureSamples]]:
        """(what it is of, a key of METRICS, its samples) of each, but for those of ranks that `facts` does not have."""
        ranks = {f"rank {rank.rank}" for rank in facts.ranks.values()}
        for of, what in self._columns:
            figure = self.get(of, what) if of in ranks or not of.startswith("rank ") else None
            if figure is not None:
                yield of, what, figure

    def within(self, first_s: float, last_s: float) -> NodeSeries:
        """The same at that time only."""
        part = NodeSeries(self.host, self.troubles, self._columns)
        part._made = self._made
        part._span = first_s, last_s
        return part

    def of(self, what: str) -> list[str]:
        """The GPUs, ranks or ports that have this figure ("" is the host)."""
        return [of for of, its in self._columns if its == what and self.get(of, its) is not None]


def node_series(host: str, messages: Iterable[TelemetryMessage], zero_ns: int) -> NodeSeries | None:
    """From all lives of a node's agent; `zero_ns` is the event, by the host's clock. None if there is no sample.

    Messages that cannot be unpacked are skipped.
    """
    lives = sorted(messages, key=lambda message: message.began_ns)[-MOST_LIVES:]
    columns: dict[tuple[str, str], list[_Part]] = {}
    for message in lives:
        try:
            seconds, table = unpack_samples(message.samples, len(message.series))
        except ValueError as error:
            if from_outside(error):
                raise
            continue
        at_s = seconds + (message.began_ns - zero_ns) / 1e9
        for column, name in enumerate(message.series):
            columns.setdefault((name.of, name.what), []).append((at_s, table[:, column]))
    if not columns:
        return None
    troubles = list(dict.fromkeys(trouble for message in lives for trouble in message.troubles))
    return NodeSeries(host, troubles, columns)


def _one(at_s: Any, column: Any, counts: bool) -> tuple[Any, Any, Any]:
    known = numpy.flatnonzero(numpy.isfinite(column))
    at, values = at_s[known], column[known]
    over = numpy.diff(at, prepend=at[:1])
    if counts:
        values = numpy.where((values >= 0) & (over > 0), values, numpy.nan)
        over = numpy.where(over > 0, over, numpy.nan)
    return at, values, over
