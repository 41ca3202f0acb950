"""Which numbers are worth a closer look: a cheap filter over what has arrived, before a page is decoded and judged.

It may tell of more than the judge finds something in, and never of less.
"""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch

from ...core.values import COUNTED, DTYPE_MAX, INF_BITS, SHARE, Encoding, decode
from .tensor_stats import FLOATS

_ENCODINGS = 256
_NEVER = (1 << 63) - 1
_ALL_ZERO = SHARE << 16 | COUNTED
_ROUNDING = {int(Encoding.FLOAT64): 1 << 12}
"""The judge compares logarithms, which for float64 are exact to a thousand neighbours only."""


class Notable:
    """The filter. `near_bits`: encoding -> sign-cleared bits from which on a value is near overflow, empty for none.
    `underflow_share`: share of subnormal elements from which on a tensor is in underflow, None for none."""

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
        """Bits from which on a tensor is near overflow, of a dtype whose numbers are recorded as those of a wider one.

        None for the others, which their encoding tells.
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


def _powers(near_bits: dict[int, int]) -> float | None:
    """Powers of two below the largest number from which on a value is near it; None when nothing is near."""
    for encoding, bits in near_bits.items():
        near = decode(bits, encoding)
        if encoding in INF_BITS and near > 0:
            return math.log2(decode(INF_BITS[Encoding(encoding)] - 1, encoding)) - math.log2(near)
    return None
