"""The floating point types whose bits are read directly, and the dtypes in which small numbers vanish."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...core.values import DTYPE_CODES, INF_BITS, SIGN_MASK, ValueEncoding


class FloatFormat(NamedTuple):
    """A floating point type whose bits are read directly."""

    code: int
    """Index of its name in core.values.DTYPE_NAMES."""
    bits: torch.dtype
    size: int
    """Bytes"""
    mask: int
    meta: int
    """`meta` of a finite tensor."""
    inf: int
    low: bool
    """Whether the type is of low precision."""


CODES: dict[torch.dtype, int] = {
    dtype: code for name, code in DTYPE_CODES.items() if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""dtype -> its index in core.values.DTYPE_NAMES."""
LOW_PRECISION = {
    dtype
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""dtypes in which small numbers vanish: their zeros and subnormals are counted."""


def _float(dtype: torch.dtype, bits: torch.dtype, encoding: ValueEncoding) -> FloatFormat:
    mask, inf = SIGN_MASK[encoding], INF_BITS[encoding]
    return FloatFormat(CODES[dtype], bits, bits.itemsize, mask, encoding << 8, inf, dtype in LOW_PRECISION)


FLOATS = {
    torch.float32: _float(torch.float32, torch.int32, ValueEncoding.FLOAT32),
    torch.float16: _float(torch.float16, torch.int16, ValueEncoding.FLOAT16),
    torch.bfloat16: _float(torch.bfloat16, torch.int16, ValueEncoding.BFLOAT16),
    torch.float64: _float(torch.float64, torch.int64, ValueEncoding.FLOAT64),
}
