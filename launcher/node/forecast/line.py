"""When a number that grows passes a limit, if it goes on as it did; and whether that can be told at all. Pure, NumPy.

    over the last 32 batches abs max was 2^3, 2^3.3, 2^3.5, ... 2^11  ->  float16's 2^16 in about 20 batches (18 to 22)

A line is put through log2 of the numbers (Theil and Sen: the median of the slopes of all pairs, which a few wild
batches do not turn). It is believed only when the growth stands far above the scatter, has not begun to flatten, and
has to go on for no longer than it was seen. Growth like the square root of the batches, as healthy weights have it,
flattens too much to be believed; growth in proportion to the batches does not. docs/forecast.md has what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

WINDOWS = (16, 32, 64, 128)
"""Batches that a line is put through: the last so many that were kept, the shortest that can be believed."""
FEWEST = 12
_LEAST_GROWTH = 0.25
"""Powers of two within the window,"""
_ABOVE_SCATTER = 8.0
"""and so many times the scatter around the line."""
_NOT_FLATTER = 0.6
"""The slope of the window's second half, as a share of that of its first. In proportion to the batches: 0.7."""
_PROPORTIONAL = 0.7
_WILD_EARLY, _WILD_LATE = 3.5, 2.0
"""A wild batch passes before the line does: so many times the scatter early, or late."""
HORIZON = 1.0
"""It is looked ahead for so many times as long as the window is."""


class Passing(NamedTuple):
    """In how many batches after the last one the limit is passed, and how surely: between `earliest` and `latest`."""

    after: int
    earliest: int
    latest: int
    since: int
    """The first batch of the window."""


def forecast(batches: Sequence[int], numbers: Any, limit: float) -> Passing | None:
    """None if it cannot be told, or nothing is to be told.

    `batches` ascend, `numbers` is float of shape (batches,): abs max; what is not above zero was not measured.
    """
    there = numpy.asarray(numbers, numpy.float64)
    at = numpy.asarray(batches, numpy.float64)
    if not len(there) or not numpy.isfinite(there).all():
        return None
    at, there = at[there > 0], numpy.log2(there[there > 0])
    for window in WINDOWS:
        if len(at) >= min(window, FEWEST + window // 2):
            found = _passing(at[-window:], there[-window:], math.log2(limit))
            if found is not None:
                return found
    return None


def _passing(at: Any, level: Any, limit: float) -> Passing | None:
    span = at[-1] - at[0]
    slope, scatter, now = _line(at, level)
    growth = slope * span
    if growth < max(_LEAST_GROWTH, _ABOVE_SCATTER * scatter) or level[-1] >= limit:
        return None
    middle = (at[0] + at[-1]) / 2
    early, late = at <= middle, at >= middle
    if min(early.sum(), late.sum()) < FEWEST // 2:
        return None
    first, second = _slope(at[early], level[early]), _slope(at[late], level[late])
    if second < _NOT_FLATTER * first or second <= 0:
        return None
    left = max(0.0, limit - now)
    if left / slope > HORIZON * span:
        return None
    bend = min(1.0, max(0.0, (1 - second / first) / (1 - _PROPORTIONAL))) if first > 0 else 0.0
    last = second - max(0.0, first - second) / 2  # the slope of the second half is that of its middle
    straight, proportional = left / slope, (2.0**left - 1) / (math.log(2) * last)
    more, less = left + _WILD_LATE * scatter, max(0.0, left - _WILD_EARLY * scatter)
    latest = more / min(slope, second), (2.0**more - 1) / (math.log(2) * last)
    return Passing(
        max(1, round(_between(straight, proportional, bend / 2))),
        max(1, math.floor(_steeper(less, max(slope, second), span, second - first))),
        max(2, math.ceil(_between(*latest, bend))),
        int(at[0]),
    )


def _steeper(left: float, slope: float, span: float, bend: float) -> float:
    """When so much is covered by a slope that goes on to grow as it did from one half of the window to the other."""
    grows = max(0.0, bend) / (span / 2)
    slope += grows * span / 4
    return 2 * left / (slope + math.sqrt(slope * slope + 2 * grows * left))


def _between(one: float, other: float, share: float) -> float:
    """0 is one, 1 the other."""
    return one ** (1 - share) * other**share if one > 0 and other > 0 else one


def _line(at: Any, level: Any) -> tuple[float, float, float]:
    """Slope, scatter around the line (as a standard deviation, of the median distance), and the line's end."""
    slope = _slope(at, level)
    rest = level - slope * at
    middle = float(numpy.median(rest))
    return slope, 1.4826 * float(numpy.median(numpy.abs(rest - middle))), middle + slope * float(at[-1])


def _slope(at: Any, level: Any) -> float:
    """The median of the slopes of all pairs."""
    one, other = numpy.triu_indices(len(at), 1)
    return float(numpy.median((level[other] - level[one]) / (at[other] - at[one])))
