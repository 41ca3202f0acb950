"""Which numbers are notable: a cheap filter over numbers that have arrived, before a frame is decoded and judged.

It may pass numbers in which the judge finds nothing. It never holds back numbers in which the judge finds something.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import numpy
import torch

from ...core.judge import WarningLimits
from ...core.recorder import layout
from ...core.recorder.layout import SegmentField
from ...core.recorder.own_pages import OwnPages
from ...core.recorder.page_tables import FRAMES, ROWS, VALUES
from ...core.recorder.writer import OpenPage
from ...core.values import COUNTED, DTYPE_CODES, DTYPE_MAX, DTYPE_NAMES, PENDING, SHARE, NonFinite, ValueEncoding
from .float_formats import CODES, FLOATS
from .tensor_stats import measure

try:
    from ..native.core import may_be_notable as _may_be_notable
except ImportError:  # gpuwatch was installed without a C compiler
    _may_be_notable = None  # type: ignore[assignment]

_CODES = 256
_NEVER = (1 << 63) - 1
_BY_ENCODING = {
    ValueEncoding.FLOAT64: "float64",
    ValueEncoding.FLOAT32: "float32",
    ValueEncoding.FLOAT16: "float16",
    ValueEncoding.BFLOAT16: "bfloat16",
}
"""Encoding -> the dtype that is recorded in it as it is."""


class NotableFilter:
    """The filter with the limits of one watch.

    It knows a value by its dtype code if it stands in a row, and by its encoding alone if it comes from a device. An
    encoding has the limits of its own dtype. `wide_limit` has those of a dtype that is recorded in a wider encoding.
    """

    def __init__(self, limits: WarningLimits) -> None:
        self.near = near_bits(limits.near_overflow)
        """dtype code -> (bits of abs max from which on it is near overflow, bits of the largest finite number)"""
        share = limits.underflow_share
        self._least_share = int(share * SHARE) if 0 < share < 1 else SHARE + 1
        self._powers = limits.near_overflow
        self._of_dtype = _ranges(self.near)
        own = {int(encoding): DTYPE_CODES[name] for encoding, name in _BY_ENCODING.items()}
        self._of_encoding = _ranges({encoding: self.near[code] for encoding, code in own.items() if code in self.near})
        self._wide_limits: dict[torch.dtype, int | None] = {}

    def value(self, dtype: int, high: int, meta: int) -> bool:
        """Whether one value of this dtype code is notable. core/values.py says what `high` and `meta` are."""
        return bool(self._is_notable(high, meta, *self.near.get(dtype, (_NEVER, _NEVER))))

    def rows(self, dtype: Any, high: Any, meta: Any) -> Any:
        """The same for arrays of one length: dtype codes as integers, high and meta as int64. Returns one of bool."""
        return self._is_notable(high, meta, *self._of_dtype[:, dtype])

    def any(self, values: Any) -> bool:
        """Whether one of the values from a device, (n, 3) of int64 (low, high, meta), is notable by its encoding."""
        if _may_be_notable is not None and not _may_be_notable(values, self._of_encoding[0]):
            return False  # nearly all values
        high, meta = values[:, 1], values[:, 2]
        return bool(self._is_notable(high, meta, *self._of_encoding[:, meta >> 8 & 0xFF]).any())

    def _is_notable(self, high: Any, meta: Any, near: Any, largest: Any) -> Any:
        """The filter itself, for integers and for arrays: non-finite, near overflow, or in underflow."""
        is_non_finite = (meta & 0xFF) != 0
        is_near = (near <= high) & (high < largest)
        share, zeros = meta >> 32 & SHARE, meta >> 16 & SHARE
        is_underflow = ((meta & COUNTED) != 0) & ((share >= self._least_share) | (zeros == SHARE))
        return is_non_finite | is_near | is_underflow

    def wide_limit(self, dtype: torch.dtype) -> int | None:
        """For a dtype that is recorded in a wider encoding: bits from which on a tensor is near overflow.

        None for the other dtypes, whose encoding has the limit.
        """
        if dtype in FLOATS or not (dtype.is_floating_point or dtype.is_complex):
            return None
        if dtype not in self._wide_limits:
            largest = DTYPE_MAX.get(str(dtype).removeprefix("torch."))
            limit = None
            if largest is not None and self._powers > 0:
                near = largest * 2.0 ** -(self._powers + 0.01)
                wide = (
                    numpy.float64(near).view(numpy.int64) if dtype.is_complex else numpy.float32(near).view(numpy.int32)
                )
                limit = int(wide)
            self._wide_limits[dtype] = limit
        return self._wide_limits[dtype]


def near_bits(powers: float) -> dict[int, tuple[int, int]]:
    """dtype code -> (bits of the smallest number that is near overflow, bits of the largest finite one).

    The largest number itself is not near overflow, since masks are filled with it. `powers` = 0: no number is.
    """
    found: dict[int, tuple[int, int]] = {}
    if powers <= 0:
        return found
    for dtype, code in CODES.items():
        largest = DTYPE_MAX.get(DTYPE_NAMES[code])
        if largest is None or dtype.is_complex:
            continue
        limits = torch.tensor([largest * 2.0**-powers, largest], dtype=torch.float64, device="cpu").to(dtype)
        # The judge compares logarithms, which are equal for neighbouring float64 numbers.
        rounding = 1 << 12 if dtype is torch.float64 else 0
        found[code] = (measure(limits[0]).high - rounding, measure(limits[1]).high)
    return found


def _ranges(near: dict[int, tuple[int, int]]) -> Any:
    """(2, 256) of int64: the two numbers of each code, and for any other code numbers that no value reaches."""
    ranges = numpy.full((2, _CODES), _NEVER, numpy.int64)
    for code, limits in near.items():
        ranges[:, code] = limits
    return ranges


# Which frames of a page the judge should see: found in its tables at once, so that only those are decoded.
#
# A page of a transformer has thousands of rows, and a mask of -inf in nearly every batch.

Mask = Callable[[Any, Any, Any], Any]
"""(dtype codes, high, meta), arrays of one length -> an array of bool."""


def frames_to_judge(
    own: OwnPages,
    page: OpenPage,
    start: int,
    notable: Mask,
    arguments: Any,
    undecided: Set[int] = frozenset(),
    *,
    everything: bool,
) -> tuple[list[int], int]:
    """(indices of the frames from `start` on with a notable row, index of the first frame that was not checked).

    The search stops at the first frame with a number that has not arrived, unless `everything` has. `arguments` is an
    array of bool by slot: a row of such an argument is never notable by itself.

    The call around one with a bad value is included as well, finite or not: it shows where that value went. `undecided`
    are the indices of earlier frames with such a value.
    """
    segments = list(own.segments(page))
    values = _values(own, segments)
    found: list[int] = []
    end = start
    waiting: list[tuple[int, int]] = []
    for head, at in segments:
        base, count = head[SegmentField.FRAME_BASE], head[SegmentField.FRAMES]
        skip = max(0, start - base)
        frames = own.table(at + layout.FRAMES_AT, FRAMES, count)
        if skip >= count:
            _around(frames, numpy.isin(frames["index"], list(undecided)), waiting)
            continue
        rows = own.table(at + layout.ROWS_AT, ROWS, head[SegmentField.ROWS])
        stats = values[numpy.minimum(rows["value"].astype(numpy.int64), len(values) - 1)]
        pending = stats["meta"] == PENDING
        interesting = notable(rows["dtype"], stats["high"], stats["meta"]) & ~pending
        interesting &= ~arguments[numpy.minimum(rows["slot"], len(arguments) - 1)]
        # Sums from the left: a frame has such a row if the sum grows over its rows.
        sums = numpy.concatenate(([0], numpy.cumsum(interesting))), numpy.concatenate(([0], numpy.cumsum(pending)))
        first, last = frames["first"].astype(numpy.int64), (frames["first"] + frames["count"]).astype(numpy.int64)
        has = sums[0][last] > sums[0][first]
        flagged = interesting & ((stats["meta"] & 0xFF) != 0)
        flagged = numpy.concatenate(([0], numpy.cumsum(flagged)))
        bad = (flagged[last] > flagged[first]) & (numpy.arange(count) >= skip)
        if undecided:
            bad |= numpy.isin(frames["index"], list(undecided))
        has |= _around(frames, bad, waiting)
        has = has[skip:]
        if not everything:
            waits = numpy.flatnonzero((sums[1][last] > sums[1][first])[skip:])
            if len(waits):
                has = has[: waits[0]]
                return found + [base + skip + int(place) for place in numpy.flatnonzero(has)], base + skip + int(
                    waits[0]
                )
        found += [base + skip + int(place) for place in numpy.flatnonzero(has)]
        end = base + count
    return found, max(start, end)


def slots_of_masks(own: OwnPages, page: OpenPage, arguments: Any) -> set[int]:
    """The slots of arguments in a page that hold -inf, and nothing else that is not finite. `arguments`: as above."""
    segments = list(own.segments(page))
    values = _values(own, segments)
    found: set[int] = set()
    for head, at in segments:
        rows = own.table(at + layout.ROWS_AT, ROWS, head[SegmentField.ROWS])
        meta = values[numpy.minimum(rows["value"].astype(numpy.int64), len(values) - 1)]["meta"]
        is_mask = (meta != PENDING) & ((meta & 0xFF) == int(NonFinite.NEGINF))
        slots = rows["slot"][is_mask & arguments[numpy.minimum(rows["slot"], len(arguments) - 1)]]
        found.update(int(slot) for slot in slots)
    return found


def _around(frames: Any, bad: Any, waiting: list[tuple[int, int]]) -> Any:
    """An array of bool: the calls around those in `bad`. `waiting` are (parent, depth) of calls of earlier segments."""
    found = numpy.zeros(len(frames), bool)
    parents, depths = frames["parent"], frames["depth"]
    open_ = [(parent, depth, 0) for parent, depth in waiting]
    open_ += [(int(parents[place]), int(depths[place]), int(place) + 1) for place in numpy.flatnonzero(bad)]
    waiting.clear()
    for parent, depth, since in open_:
        around = numpy.flatnonzero((frames["module"][since:] == parent) | (depths[since:] < depth))
        if len(around):
            found[since + around[0]] = True
        else:
            waiting.append((parent, depth))
    return found


def _values(own: OwnPages, segments: list[tuple[list[int], int]]) -> Any:
    """All values of a page by their index, and one behind them that says nothing: for rows without a value."""
    most = max((head[SegmentField.VALUE_BASE] + head[SegmentField.VALUES] for head, _ in segments), default=0)
    values = numpy.zeros(most + 1, VALUES)
    for head, at in segments:
        base, count = head[SegmentField.VALUE_BASE], head[SegmentField.VALUES]
        values[base : base + count] = own.table(at + layout.VALUES_AT, VALUES, count)
    return values
