"""The telemetry of one node as series over time, zero being the event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy

from ...core.metrics import is_count
from ...core.wire.columns import unpack_samples
from ...core.wire.messages import TelemetryMessage

_Part = tuple[Any, Any]
"""(seconds after the event, float64 values) of shape (samples,), nan where there is none."""
MOST_LIVES = 8
"""Agents of one node that are looked at, the newest."""


@dataclass(frozen=True)
class FigureSamples:
    """One figure. Arrays are float64 of shape (samples,), of those samples alone that have it."""

    at_s: Any
    values: Any
    """A level as it was; a count as what it grew by, nan where that is not known."""
    over_s: Any
    """Of a count: in how many seconds it grew so."""
    counts: bool

    @property
    def shown(self) -> Any:
        """A level as it was, a count as its growth in a second."""
        return self.values / self.over_s if self.counts else self.values

    def within(self, first_s: float, last_s: float) -> FigureSamples:
        """Of that time only. Its first sample of a count has grown from before."""
        there = (self.at_s >= first_s) & (self.at_s <= last_s)
        return FigureSamples(self.at_s[there], self.values[there], self.over_s[there], self.counts)

    @property
    def share(self) -> float:
        """A count's growth in a second over all of it; nan if it is not known."""
        known = numpy.isfinite(self.values) & (self.over_s > 0)
        over_s = float(self.over_s[known].sum())
        return float(self.values[known].sum()) / over_s if over_s > 0 else float("nan")


class NodeSeries:
    """Of one node, by (what it is of, a key of METRICS). A series is made when it is asked for: few of them are."""

    def __init__(self, host: str, interval_s: float, troubles: list[str], columns: dict[tuple[str, str], list[_Part]]):
        """`columns`: of each series its parts, one for each life of the node's agent that has it."""
        self.host = host
        self.interval_s = interval_s
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
            found = self._made[of, what] = _joined(parts)
        if self._span is not None:
            found = found.within(*self._span)
        return found if len(found.at_s) else None

    def within(self, first_s: float, last_s: float) -> NodeSeries:
        """Of that time only."""
        part = NodeSeries(self.host, self.interval_s, self.troubles, self._columns)
        part._made = self._made
        part._span = first_s, last_s
        return part

    def of(self, what: str) -> list[str]:
        """What has this figure."""
        return [of for of, its in self._columns if its == what and self.get(of, its) is not None]


def node_series(host: str, messages: Iterable[TelemetryMessage], zero_ns: int) -> NodeSeries | None:
    """Of all lives of a node's agent; `zero_ns` is the event, by the host's clock. None if there is no sample.

    What cannot be unpacked is left out.
    """
    lives = sorted(messages, key=lambda message: message.began_ns)[-MOST_LIVES:]
    columns: dict[tuple[str, str], list[_Part]] = {}
    interval_s = 0.0
    for message in lives:
        try:
            seconds, table = unpack_samples(message.samples, len(message.series))
        except ValueError:
            continue
        interval_s = message.interval_s
        at_s = seconds + (message.began_ns - zero_ns) / 1e9
        for column, name in enumerate(message.series):
            columns.setdefault((name.of, name.what), []).append((at_s, table[:, column]))
    if not columns:
        return None
    troubles = list(dict.fromkeys(trouble for message in lives for trouble in message.troubles))
    return NodeSeries(host, interval_s, troubles, columns)


def _one(at_s: Any, column: Any, counts: bool) -> FigureSamples:
    known = numpy.flatnonzero(numpy.isfinite(column))
    at, values = at_s[known], column[known]
    over = numpy.diff(at, prepend=at[:1])
    if counts:
        values = numpy.where((values >= 0) & (over > 0), values, numpy.nan)
        over = numpy.where(over > 0, over, numpy.nan)
    return FigureSamples(at, values, over, counts)


def _joined(parts: list[FigureSamples]) -> FigureSamples:
    if len(parts) == 1:
        return parts[0]
    at_s, values, over_s = (
        numpy.concatenate([getattr(part, name) for part in parts]) for name in ("at_s", "values", "over_s")
    )
    return FigureSamples(at_s, values, over_s, parts[0].counts)
