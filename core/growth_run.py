"""When a number began to run away, batch by batch. Pure.

    batch      3     4     5     6       7
    abs max    2.1   2.1   10    7e4     4e13      it grew in batches 5 to 7: the run is that of batches 4 to 7

The collector asks it of the outputs of a model, to find why they overflowed. A node agent asks it, too, for then the
pages from before the growth tell how it began.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

FACTOR = 3.0
"""A number grows that is larger by this factor than in the batch before."""
MUCH = 100.0
"""Growth in all that no ordinary training has within a few batches."""
MOST_BATCHES = 32
"""How many of the last batches are looked at."""

SizeSeries = list[tuple[int, float]]
"""(batch, abs max), in the order of the batches."""


def known_sizes(series: Iterable[tuple[int, float]], until: int) -> SizeSeries:
    """Where it was finite and not 0, in the last batches up to and with `until`."""
    points = [point for point in series if point[0] <= until]
    return [(batch, size) for batch, size in points[-MOST_BATCHES:] if 0 < size < math.inf]


def growing_run(series: SizeSeries, until: int) -> SizeSeries:
    """The batches up to `until`, or the one before it, in which a number grew each time, and the batch before these.

    [] if it did not grow, or not by MUCH in all.
    """
    start = len(series) - 1
    while start > 0 and series[start][1] >= FACTOR * series[start - 1][1]:
        start -= 1
    run = series[max(0, start) :]
    grew = len(run) > 1 and run[-1][1] >= MUCH * run[0][1] and run[-1][0] >= until - 1
    return run if grew else []
