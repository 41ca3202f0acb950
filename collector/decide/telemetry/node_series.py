"""The telemetry of one node as series over time, zero being the event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy

from ....core.telemetry.metrics import is_count
from ....core.telemetry.packing import unpack_samples
from ....core.wire.messages import Telemetry

MOST_LIVES = 8
"""Agents of one node that are looked at, the newest."""


@dataclass(frozen=True)
class Series:
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

    def within(self, first_s: float, last_s: float) -> Series:
        """Of that time only. Its first sample of a count has grown from before."""
        there = (self.at_s >= first_s) & (self.at_s <= last_s)
        return Series(self.at_s[there], self.values[there], self.over_s[there], self.counts)

    @property
    def share(self) -> float:
        """A count's growth in a second over all of it; nan if it is not known."""
        known = numpy.isfinite(self.values) & (self.over_s > 0)
        over_s = float(self.over_s[known].sum())
        return float(self.values[known].sum()) / over_s if over_s > 0 else float("nan")


@dataclass(frozen=True)
class NodeSeries:
    """Of one node, by (what it is of, a key of METRICS)."""

    host: str
    interval_s: float
    series: dict[tuple[str, str], Series]
    troubles: list[str]

    def get(self, of: str, what: str) -> Series | None:
        """One of them, if it has any sample."""
        found = self.series.get((of, what))
        return found if found is not None and len(found.at_s) else None

    def within(self, first_s: float, last_s: float) -> NodeSeries:
        """Of that time only."""
        series = {name: each.within(first_s, last_s) for name, each in self.series.items()}
        return NodeSeries(self.host, self.interval_s, series, self.troubles)

    def of(self, what: str) -> list[str]:
        """What has this figure."""
        return [of for of, its in self.series if its == what and len(self.series[of, its].at_s)]


def node_series(host: str, messages: Iterable[Telemetry], zero_ns: int) -> NodeSeries | None:
    """Of all lives of a node's agent; `zero_ns` is the event, by the host's clock. None if there is no sample.

    What cannot be unpacked is left out.
    """
    lives = sorted(messages, key=lambda message: message.began_ns)[-MOST_LIVES:]
    parts: dict[tuple[str, str], list[Series]] = {}
    interval_s = 0.0
    for message in lives:
        try:
            seconds, table = unpack_samples(message.samples, len(message.series))
        except ValueError:
            continue
        interval_s = message.interval_s
        at_s = seconds + (message.began_ns - zero_ns) / 1e9
        for column, name in enumerate(message.series):
            series = _one(at_s, table[:, column], is_count(name.what))
            if len(series.at_s):
                parts.setdefault((name.of, name.what), []).append(series)
    if not parts:
        return None
    troubles = list(dict.fromkeys(trouble for message in lives for trouble in message.troubles))
    return NodeSeries(host, interval_s, {name: _joined(found) for name, found in parts.items()}, troubles)


def _one(at_s: Any, column: Any, counts: bool) -> Series:
    known = numpy.flatnonzero(numpy.isfinite(column))
    at, values = at_s[known], column[known]
    over = numpy.diff(at, prepend=at[:1])
    if counts:
        values = numpy.where((values >= 0) & (over > 0), values, numpy.nan)
        over = numpy.where(over > 0, over, numpy.nan)
    return Series(at, values, over, counts)


def _joined(parts: list[Series]) -> Series:
    if len(parts) == 1:
        return parts[0]
    at_s, values, over_s = (
        numpy.concatenate([getattr(part, name) for part in parts]) for name in ("at_s", "values", "over_s")
    )
    return Series(at_s, values, over_s, parts[0].counts)
