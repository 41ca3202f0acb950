"""Which numbers are notable: a cheap filter over numbers that have arrived, before a frame is decoded and judged.

It may pass numbers in which the judge finds nothing. It never holds back numbers in which the judge finds something.
"""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch

from ...core.judge import Limits
from ...core.values import COUNTED, DTYPE_CODES, DTYPE_MAX, DTYPE_NAMES, INF_BITS, SHARE, Encoding, decode
from .tensor_stats import CODES, FLOATS, measure

_ENCODINGS = 256
_NEVER = (1 << 63) - 1
_ALL_ZERO = SHARE << 16 | COUNTED
_ROUNDING = {int(Encoding.FLOAT64): 1 << 12}
"""Bits of tolerance: the judge compares logarithms, which do not tell neighbouring float64 numbers apart."""


class Notable:
    """The filter for arrays of values from a device.

    `near_bits`: encoding -> bits (without the sign) from which on a value is near overflow; empty: no such limit.
    `underflow_share`: the share of subnormal elements from which on a tensor is in underflow; None: no such limit.
    """

    def __init__(self, near_bits: dict[int, int] | None = None, underflow_share: float | None = None) -> None:
        self._near = numpy.full(_ENCODINGS, _NEVER, numpy.int64)
        self._largest = numpy.full(_ENCODINGS, _NEVER, numpy.int64)
        for encoding, bits in INF_BITS.items():
            self._largest[encoding] = bits - 1  # what masks are filled with
        for code, bits in (near_bits or {}).items():
            self._near[code] = bits - _ROUNDING.get(code, 0)
        self._powers = _powers(near_bits or {})
        self._limits: dict[torch.dtype, int | None] = {}
        self._least_share = _NEVER
        if underflow_share is not None and 0 < underflow_share < 1:
            self._least_share = math.floor(underflow_share * SHARE) << 32 | COUNTED

    def limit(self, dtype: torch.dtype) -> int | None:
        """For a dtype that is recorded in a wider encoding: bits from which on a tensor is near overflow.

        None for the other dtypes, whose encoding has the limit.
        """
        if dtype in FLOATS or not (dtype.is_floating_point or dtype.is_complex):
            return None
        if dtype not in self._limits:
            largest = DTYPE_MAX.get(str(dtype).removeprefix("torch."))
            limit = None
            if largest is not None and self._powers is not None:
                near = largest * 2.0 ** -(self._powers + 0.01)
                wide = (
                    numpy.float64(near).view(numpy.int64) if dtype.is_complex else numpy.float32(near).view(numpy.int32)
                )
                limit = int(wide)
            self._limits[dtype] = limit
        return self._limits[dtype]

    def any(self, values: Any) -> bool:
        """Whether one of the values, (n, 3) of int64 (low, high, meta), is notable by itself."""
        high, meta = values[:, 1], values[:, 2]
        encoding = meta >> 8 & 0xFF
        notable = (meta & 0xFF) != 0
        notable |= (high >= self._near[encoding]) & (high < self._largest[encoding])
        notable |= (meta & (SHARE << 32 | COUNTED)) >= self._least_share
        notable |= (meta & _ALL_ZERO) == _ALL_ZERO
        return bool(notable.any())


class NotableValue:
    """The same filter for one value in host memory: non-finite, near overflow or in underflow."""

    def __init__(self, limits: Limits) -> None:
        self.near = near_bits(limits.near_overflow)
        """dtype code -> (bits of abs max from which on it is near overflow, bits of the largest finite number)"""
        share = limits.underflow_share
        self._least_share = int(share * SHARE) if 0 < share < 1 else SHARE + 1
        self._from = numpy.full(_ENCODINGS, _NEVER, numpy.int64)
        self._to = numpy.full(_ENCODINGS, _NEVER, numpy.int64)
        for dtype, (first, last) in self.near.items():
            self._from[dtype], self._to[dtype] = first, last

    def mask(self, dtype: Any, high: Any, meta: Any) -> Any:
        """The same for arrays of one length: dtype codes, and high and meta as int64. Returns an array of bool."""
        found = (meta & 0xFF) != 0
        found |= (high >= self._from[dtype]) & (high < self._to[dtype])
        share, zeros = meta >> 32 & SHARE, meta >> 16 & SHARE
        return found | ((meta & COUNTED) != 0) & ((share >= self._least_share) | (zeros == SHARE))

    def __call__(self, dtype: int, high: int, meta: int) -> bool:
        """Whether a value with these numbers (see core/values.py) must be judged."""
        if meta & 0xFF:
            return True
        near = self.near.get(dtype)
        if near is not None and near[0] <= high < near[1]:
            return True
        return meta & COUNTED != 0 and (meta >> 32 & SHARE >= self._least_share or meta >> 16 & SHARE == SHARE)


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
        found[code] = (measure(limits[0]).high, measure(limits[1]).high)
    return found


def near_by_encoding(powers: float) -> dict[int, int]:
    """Encoding -> bits of the smallest number that is near overflow: the `near_bits` of `Notable`."""
    dtypes = {"float64": Encoding.FLOAT64, "float32": Encoding.FLOAT32}
    dtypes |= {"float16": Encoding.FLOAT16, "bfloat16": Encoding.BFLOAT16}
    near = near_bits(powers)
    return {int(encoding): near[code][0] for name, encoding in dtypes.items() if (code := DTYPE_CODES[name]) in near}


def _powers(near_bits: dict[int, int]) -> float | None:
    """The number of powers of two below the largest number that counts as near overflow; None without a limit."""
    for encoding, bits in near_bits.items():
        near = decode(bits, encoding)
        if encoding in INF_BITS and near > 0:
            return math.log2(decode(INF_BITS[Encoding(encoding)] - 1, encoding)) - math.log2(near)
    return None
