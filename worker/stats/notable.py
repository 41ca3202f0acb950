"""Which numbers are notable: a cheap filter over numbers that have arrived, before a frame is decoded and judged.

It may pass numbers in which the judge finds nothing. It never holds back numbers in which the judge finds something.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from ...core.judge import WarningLimits
from ...core.values import COUNTED, DTYPE_CODES, DTYPE_MAX, DTYPE_NAMES, SHARE, ValueEncoding
from .tensor_stats import CODES, FLOATS, measure

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
        # The judge compares logarithms, which do not tell neighbouring float64 numbers apart.
        rounding = 1 << 12 if dtype is torch.float64 else 0
        found[code] = (measure(limits[0]).high - rounding, measure(limits[1]).high)
    return found


def _ranges(near: dict[int, tuple[int, int]]) -> Any:
    """(2, 256) of int64: the two numbers of each code, and for any other code numbers that no value reaches."""
    ranges = numpy.full((2, _CODES), _NEVER, numpy.int64)
    for code, limits in near.items():
        ranges[:, code] = limits
    return ranges
