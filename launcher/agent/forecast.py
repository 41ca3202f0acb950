"""Which modules of one root are about to pass their dtype's limit, from the batches that a rank's history holds.

Codes are the upper halves of float32 (core/wire/columns.py): 128 of them are a power of two. So whether a number grows
fast enough to be worth a line is seen from a few batches of all modules at once, with integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from ...core.values import DTYPE_MAX, DTYPE_NAMES

# When a growing number passes a limit if it keeps growing, and whether the data allow a forecast. Pure, NumPy.
#
# over the last 32 batches abs max was 2^3, 2^3.3, 2^3.5, ... 2^11  ->  float16's 2^16 in about 20 batches (18 to 22)
#
# A line is put through log2 of the numbers (Theil and Sen: the median of the slopes of all pairs, which a few wild
# batches do not turn). It is believed only when the growth stands far above the scatter, has not begun to flatten, and
# has to go on for no longer than it was seen. Growth like the square root of the batches, as healthy weights have it,
# flattens too much to be believed; growth in proportion to the batches does not. docs/forecast.md has what was
# measured.

WINDOWS = (16, 32, 64, 128)
"""How many of the last batches a line is put through: the shortest window that can be believed."""
FEWEST = 12
_LEAST_GROWTH = 0.25
"""Powers of two within the window,"""
_ABOVE_SCATTER = 8.0
"""and this many times the scatter around the line."""
_NOT_FLATTER = 0.6
"""The slope of the window's second half, as a share of that of its first. In proportion to the batches: 0.7."""
_PROPORTIONAL = 0.7
_WILD_EARLY, _WILD_LATE = 3.5, 2.0
"""A wild batch passes before the line does: this many times the scatter early, or late."""
HORIZON = 1.0
"""How far to look ahead, as a multiple of the window."""


class LimitCrossing(NamedTuple):
    """In how many batches after the last one the limit is passed, and how surely: between `earliest` and `latest`.

    The fields are those of LimitForecast, in its order.
    """

    abs_max: float
    after: int
    earliest: int
    latest: int
    since: int


def forecast(batches: Sequence[int], numbers: Any, limit: float) -> LimitCrossing | None:
    """None if there are too few batches, or the limit is not in reach.

    `batches` ascend. `numbers` is float of shape (batches,): abs max; a number of 0 or less was not measured.
    """
    there = numpy.asarray(numbers, numpy.float64)
    at = numpy.asarray(batches, numpy.float64)
    if not len(there) or not numpy.isfinite(there).all():
        return None
    last = float(there[-1])
    at, there = at[there > 0], numpy.log2(there[there > 0])
    for window in WINDOWS:
        if len(at) >= min(window, FEWEST + window // 2):
            found = _passing(at[-window:], there[-window:], math.log2(limit))
            if found is not None:
                return LimitCrossing(last, *found)
    return None


def _passing(at: Any, level: Any, limit: float) -> tuple[int, int, int, int] | None:
    """The batches of a LimitCrossing."""
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
    return (
        max(1, round(_between(straight, proportional, bend / 2))),
        max(1, math.floor(_steeper(less, max(slope, second), span, second - first))),
        max(2, math.ceil(_between(*latest, bend))),
        int(at[0]),
    )


def _steeper(left: float, slope: float, span: float, bend: float) -> float:
    """When `left` is covered by a slope that goes on to grow as it did from one half of the window to the other."""
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


EVERY = 4
"""Batches from one look to the next."""
MOST_TOLD = 8
"""The most forecasts for one rank. Where one module grows, those behind it do, too."""
_AT_A_TIME = 4
_BACK = 16
"""How many rows the rate of change of a close module spans."""
_GROWN = 16
"""Codes: an eighth of a power of two."""
_INF = 0x7F80
_NO_LIMIT = 0x7FFF_FFFF


class BatchRow(NamedTuple):
    """What the modules below a root returned in one batch: the columns that have a number, ascending, and the codes."""

    batch: int
    step: int
    columns: Any
    codes: Any


def closest(rows: Sequence[BatchRow], dtypes: dict[int, int], most: int) -> list[tuple[int, float, float, float]]:
    """The columns that are closest to their limit in the newest of the rows.

    (column, abs max, powers of two up to the limit, powers of two a batch)
    """
    limits = _limits(dtypes)
    now = _spread(rows[-1], len(limits))
    then_row = rows[-min(_BACK, len(rows))]
    then = _spread(then_row, len(limits))
    batches = max(1, rows[-1].batch - then_row.batch)
    left = numpy.where((now > 0) & (now < _INF), limits - now, _NO_LIMIT)
    found = []
    for column in numpy.argsort(left, kind="stable")[:most].tolist():
        if left[column] < _NO_LIMIT >> 1:
            change = (now[column] - then[column]) / 128 / batches if then[column] > 0 else 0.0
            number = float(numpy.uint32(int(now[column]) << 16).view(numpy.float32))
            to_go = math.log2(DTYPE_MAX[DTYPE_NAMES[dtypes[column]]]) - math.log2(number)
            found.append((column, number, to_go, float(change)))
    return found


class RootForecasts:
    """The forecasts of one root of one rank. Each is made once, when two consecutive looks agree on it."""

    def __init__(self) -> None:
        self._rows = 0
        self._told: set[int] = set()
        self._known = 0
        """Dtypes that `_limits` was made of; a column's does not change."""
        self._limits = _limits({})
        self._before: dict[int, int] = {}
        """What the last look found: the batch by which each passes, at the latest."""

    def update(self, rows: Sequence[BatchRow], dtypes: dict[int, int]) -> list[tuple[int, LimitCrossing]]:
        """The columns that pass their limit soon. Call it for each new batch.

        `rows` are all that are kept, the newest last; `dtypes` are those of columns.
        """
        self._rows += 1
        if self._rows % EVERY or len(rows) < FEWEST or len(self._told) >= MOST_TOLD:
            return []
        found: list[tuple[int, LimitCrossing]] = []
        before, self._before = self._before, {}
        for column in self._growing(rows, dtypes):
            batches, numbers = _series(rows[-WINDOWS[-1] :], column)
            passing = forecast(batches, numbers, DTYPE_MAX[DTYPE_NAMES[dtypes[column]]])
            if passing is not None:
                self._before[column] = batches[-1] + passing.latest
                if before.get(column, -1) >= batches[-1] + passing.earliest:
                    self._told.add(column)
                    found.append((column, passing))
        return found

    def _growing(self, rows: Sequence[BatchRow], dtypes: dict[int, int]) -> list[int]:
        """Columns that are worth a line, those first that have the least left."""
        if self._known != len(dtypes):
            self._known, self._limits = len(dtypes), _limits(dtypes)
        size = len(self._limits)
        now = _spread(rows[-1], size)
        left = self._limits - now
        worth = numpy.zeros(size, bool)
        for window in WINDOWS:
            then = _spread(rows[-min(window, len(rows))], size)
            grown = now - then
            worth |= (then > 0) & (grown >= _GROWN) & (left <= 2 * HORIZON * grown)
        worth &= (now > 0) & (now < _INF) & (left > 0)
        chosen = [column for column in numpy.flatnonzero(worth).tolist() if column not in self._told]
        return sorted(chosen, key=lambda column: int(left[column]))[:_AT_A_TIME]


def _limits(dtypes: dict[int, int]) -> Any:
    """By column, as a code."""
    limits = numpy.full(max(dtypes, default=-1) + 1, _NO_LIMIT, numpy.int64)
    for column, dtype in dtypes.items():
        largest = DTYPE_MAX.get(DTYPE_NAMES[dtype]) if dtype < len(DTYPE_NAMES) else None
        if largest is not None:
            with numpy.errstate(over="ignore"):  # what float32 cannot hold is its inf
                limits[column] = int(numpy.float32(largest).view(numpy.uint32)) >> 16
    return limits


def _spread(row: BatchRow, size: int) -> Any:
    """By column; -1 where there is none."""
    found = numpy.full(size, -1, numpy.int64)
    known = row.columns < size
    found[row.columns[known]] = row.codes[known]
    return found


def _series(rows: Sequence[BatchRow], column: int) -> tuple[list[int], Any]:
    """The batches in which a column was measured, and its numbers."""
    batches, codes = [], []
    for row in rows:
        at = int(numpy.searchsorted(row.columns, column))
        if at < len(row.columns) and row.columns[at] == column:
            batches.append(row.batch)
            codes.append(int(row.codes[at]))
    return batches, (numpy.array(codes, numpy.uint32) << 16).view(numpy.float32)
