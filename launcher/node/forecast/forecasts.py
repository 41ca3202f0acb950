"""Which modules of one root are about to pass their dtype's limit, from the batches that a rank's history holds.

Codes are the upper halves of float32 (core/wire/history.py): 128 of them are a power of two. So whether a number grows
fast enough to be worth a line is seen from a few batches of all modules at once, with integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy

from ....core.values import DTYPE_MAX, DTYPE_NAMES
from .line import FEWEST, HORIZON, WINDOWS, Passing, forecast

EVERY = 4
"""Batches from one look to the next."""
MOST_TOLD = 8
"""Of one rank. Where one module grows, those behind it do, too."""
_AT_A_TIME = 4
_BACK = 16
"""Rows, for the change of what is closest."""
_GROWN = 16
"""Codes: an eighth of a power of two."""
_INF = 0x7F80
_NO_LIMIT = 0x7FFF_FFFF


class Row(Protocol):
    """One batch."""

    @property
    def batch(self) -> int: ...  # noqa: D102
    @property
    def columns(self) -> Any: ...  # noqa: D102
    @property
    def codes(self) -> Any: ...  # noqa: D102


class Told(NamedTuple):
    """A column that passes its limit soon."""

    column: int
    dtype: str
    abs_max: float
    """In the last batch."""
    passing: Passing


class Close(NamedTuple):
    """A column, and how far it is from its limit."""

    column: int
    abs_max: float
    left: float
    """Powers of two."""
    change: float
    """Powers of two a batch."""


def closest(rows: Sequence[Row], dtypes: dict[int, int], most: int) -> list[Close]:
    """The columns that are closest to their limit in the newest of the rows."""
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
            number = _number(int(now[column]))
            to_go = math.log2(DTYPE_MAX[DTYPE_NAMES[dtypes[column]]]) - math.log2(number)
            found.append(Close(column, number, to_go, float(change)))
    return found


class Forecasts:
    """Of one root of one rank. A forecast is told once, when two looks that follow each other agree on it."""

    def __init__(self) -> None:
        self._rows = 0
        self._told: set[int] = set()
        self._known = 0
        """Dtypes that `_limits` was made of; a column's does not change."""
        self._limits = _limits({})
        self._before: dict[int, int] = {}
        """What the last look found: the batch by which each passes, at the latest."""

    def look(self, rows: Sequence[Row], dtypes: dict[int, int]) -> list[Told]:
        """Call it for each new batch; `rows` are all that are kept, the newest last, `dtypes` are those of columns."""
        self._rows += 1
        if self._rows % EVERY or len(rows) < FEWEST or len(self._told) >= MOST_TOLD:
            return []
        found: list[Told] = []
        before, self._before = self._before, {}
        for column in self._growing(rows, dtypes):
            batches, numbers = _series(rows[-WINDOWS[-1] :], column)
            dtype = DTYPE_NAMES[dtypes[column]]
            passing = forecast(batches, numbers, DTYPE_MAX[dtype])
            if passing is None:
                continue
            self._before[column] = batches[-1] + passing.latest
            if before.get(column, -1) >= batches[-1] + passing.earliest:
                self._told.add(column)
                found.append(Told(column, dtype, float(numbers[-1]), passing))
        return found

    def _growing(self, rows: Sequence[Row], dtypes: dict[int, int]) -> list[int]:
        """Columns that are worth a line, those first that have the least left."""
        if self._known != len(dtypes):
            self._known, self._limits = len(dtypes), _limits(dtypes)
        limits = self._limits
        size = len(limits)
        now = _spread(rows[-1], size)
        left = limits - now
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
            limits[column] = _code(largest)
    return limits


def _code(number: float) -> int:
    """As a row has it; what float32 cannot hold is its inf."""
    with numpy.errstate(over="ignore"):
        return int(numpy.float32(number).view(numpy.uint32)) >> 16


def _number(code: int) -> float:
    return float(numpy.uint32(code << 16).view(numpy.float32))


def _spread(row: Row, size: int) -> Any:
    """By column; -1 where there is none."""
    found = numpy.full(size, -1, numpy.int64)
    known = row.columns < size
    found[row.columns[known]] = row.codes[known]
    return found


def _series(rows: Sequence[Row], column: int) -> tuple[list[int], Any]:
    """The batches in which a column was measured, and its numbers."""
    batches, codes = [], []
    for row in rows:
        at = int(numpy.searchsorted(row.columns, column))
        if at < len(row.columns) and row.columns[at] == column:
            batches.append(row.batch)
            codes.append(int(row.codes[at]))
    return batches, (numpy.array(codes, numpy.uint32) << 16).view(numpy.float32)
