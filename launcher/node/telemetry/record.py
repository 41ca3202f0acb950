"""The samples of one node, in bounded memory for any length of run: the older, the further apart. Pure.

A count is kept as it stood, so that its growth over a gap is known however many samples were let go of in it. A level
is what it was at the samples that are kept.
"""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

import numpy

from ....core.telemetry.packing import pack_samples
from ....core.wire.messages import SeriesName, Telemetry
from ..thinning import spread, thinned
from .values import Values

NEWEST = 64
"""The newest samples, each of which is kept; of those before, one of 2, of 4, and so on, 32 of each."""
MOST_SERIES = 512
SENT_BYTES = 128 << 10
"""Before it is packed."""


class _Sample(NamedTuple):
    number: int
    time_ns: int
    values: array[float]
    """By series; those that were not known yet are not in it."""


class NodeRecord:
    """Of one node, since its agent began."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], int] = {}
        self._samples: list[_Sample] = []
        self._taken = 0

    def add(self, time_ns: int, values: Values) -> None:
        """A sample, by the host's own clock."""
        for name in values:
            if name not in self._series and len(self._series) < MOST_SERIES:
                self._series[name] = len(self._series)
        row = array("d", [math.nan]) * len(self._series)
        for name, value in values.items():
            if name in self._series:
                row[self._series[name]] = value
        self._samples.append(_Sample(self._taken, time_ns, row))
        self._taken += 1
        if self._taken % NEWEST == 0:
            self._samples = thinned(self._samples, lambda sample: sample.number, NEWEST)

    def message(self, reason: str, sent_ns: int, interval_s: float, troubles: list[str]) -> Telemetry | None:
        """All of it; None if there is nothing."""
        samples = _ascending(spread(self._samples, max(8, SENT_BYTES // (8 + 4 * max(1, len(self._series))))))
        if not samples or not self._series:
            return None
        table = numpy.full((len(samples), len(self._series)), numpy.nan)
        for n, sample in enumerate(samples):
            table[n, : len(sample.values)] = sample.values
        return Telemetry(
            samples[0].time_ns,
            sent_ns,
            reason,
            interval_s,
            [SeriesName(of, what) for of, what in self._series],
            pack_samples([sample.time_ns for sample in samples], table, [what for _, what in self._series]),
            troubles,
        )


def _ascending(samples: list[_Sample]) -> list[_Sample]:
    """Without those that a clock that was set back has put behind later ones."""
    found: list[_Sample] = []
    for sample in samples:
        while found and found[-1].time_ns > sample.time_ns:
            found.pop()
        found.append(sample)
    return found
