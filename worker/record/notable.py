"""Which values the judge should see: a cheap look at three integers, which misses nothing that the judge could find."""

from __future__ import annotations

import torch

from ...core.settings import WorkerSettings
from ...core.values import COUNTED, DTYPE_CODES, DTYPE_MAX, DTYPE_NAMES, SHARE, Encoding
from ..stats.tensor_stats import CODES, measure


class Notable:
    """Non-finite, near overflow or in underflow."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.near = near_bits(settings.near_overflow)
        """dtype code -> (bits of abs max from which on it is near overflow, bits of the largest finite number)"""
        share = settings.underflow_share
        self._least_share = int(share * SHARE) if 0 < share < 1 else SHARE + 1

    def __call__(self, dtype: int, high: int, meta: int) -> bool:
        """Whether a value with these numbers (see core/values.py) may be more than recorded."""
        if meta & 0xFF:
            return True
        near = self.near.get(dtype)
        if near is not None and near[0] <= high < near[1]:
            return True
        return meta & COUNTED != 0 and (meta >> 32 & SHARE >= self._least_share or meta >> 16 & SHARE == SHARE)


def near_bits(powers: float) -> dict[int, tuple[int, int]]:
    """dtype code -> (bits of the smallest number that is near overflow, bits of the largest finite one).

    The largest number itself is left out: masks are filled with it. 0 powers of two: nothing is near.
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
    """Encoding -> bits of the smallest number that is near overflow, for what a device looks at by itself."""
    dtypes = {"float64": Encoding.FLOAT64, "float32": Encoding.FLOAT32}
    dtypes |= {"float16": Encoding.FLOAT16, "bfloat16": Encoding.BFLOAT16}
    near = near_bits(powers)
    return {int(encoding): near[code][0] for name, encoding in dtypes.items() if (code := DTYPE_CODES[name]) in near}
