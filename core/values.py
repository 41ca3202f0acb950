"""The numbers of one tensor as a recorder holds them, and how to read them back without torch.

A float's bits with the sign cleared sort as integers: every finite value, then inf, then nan, for every IEEE 754
type. So the absolute minimum and maximum of a tensor travel as the integers `low` and `high`, and `meta` says in
which encoding: `meta = flags | encoding << 8`.

    float32 tensor [-2.0, 0.5]  ->  low = 0x3f000000, high = 0x40000000, meta = FLOAT32 << 8

Where they were counted, `meta` also holds the shares of zeros and of subnormal numbers, each as a 16-bit integer
(65535 is all of them): `meta |= zeros << 16 | subnormals << 32 | COUNTED`.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

import msgspec


class NonFinite(IntFlag):
    """The kinds of non-finite numbers in a tensor. `INF` is an inf whose sign is unknown."""

    NONE = 0
    NAN = 1
    POSINF = 2
    NEGINF = 4
    INF = 8


class ValueEncoding(IntEnum):
    """How `low` and `high` are to be read."""

    INTEGER = 0
    FLOAT64 = 1
    FLOAT32 = 2
    FLOAT16 = 3
    BFLOAT16 = 4


PENDING = 0xFF << 8
"""`meta` of a value that is still on its way from the device."""

COUNTED = 1 << 48
"""In `meta`: the shares of zeros and of subnormals were counted."""
SHARE = 0xFFFF
"""The share 1.0, as `meta` holds it."""

INF_BITS = {
    ValueEncoding.FLOAT64: 0x7FF0_0000_0000_0000,
    ValueEncoding.FLOAT32: 0x7F80_0000,
    ValueEncoding.FLOAT16: 0x7C00,
    ValueEncoding.BFLOAT16: 0x7F80,
}

SIGN_MASK = {
    ValueEncoding.FLOAT64: 0x7FFF_FFFF_FFFF_FFFF,
    ValueEncoding.FLOAT32: 0x7FFF_FFFF,
    ValueEncoding.FLOAT16: 0x7FFF,
    ValueEncoding.BFLOAT16: 0x7FFF,
}

DTYPE_NAMES = (
    "unknown",
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
    "complex32",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "uint16",
    "uint32",
    "uint64",
    "qint8",
    "quint8",
    "qint32",
)
"""A row's dtype is an index into this table: append only, old recordings are read with it."""

DTYPE_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}


class Value(NamedTuple):
    """Three integers of 8 bytes, as the recorder, the wire and the store hold them."""

    low: int
    high: int
    meta: int

    @property
    def flags(self) -> NonFinite:
        """The kinds of non-finite numbers in the tensor."""
        return NonFinite(self.meta & 0xFF)

    @property
    def encoding(self) -> int:
        """How `low` and `high` are to be read."""
        return (self.meta >> 8) & 0xFF

    @property
    def abs_min(self) -> float:
        """The smallest absolute value; nan only when every element is nan."""
        return decode(self.low, self.encoding)

    @property
    def abs_max(self) -> float:
        """The largest absolute value, inf or nan if one is there."""
        return decode(self.high, self.encoding)

    @property
    def zeros(self) -> float | None:
        """Share of the elements that are zero, 0 to 1; None where they were not counted."""
        return (self.meta >> 16 & SHARE) / SHARE if self.meta & COUNTED else None

    @property
    def subnormals(self) -> float | None:
        """Share of the elements that are too small for the dtype's full precision, 0 to 1; None as above."""
        return (self.meta >> 32 & SHARE) / SHARE if self.meta & COUNTED else None


class RowStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a row (core/frames.py) and a row of the export say of a tensor, beside its extremes.

    A field that is also a property of `Value` is filled in from there (core/recorder/pages.py).
    """

    zeros: float | None = None
    """Share of elements that are zero, 0 to 1; None where they were not counted."""
    subnormals: float | None = None
    """Share of elements below the dtype's smallest normal number, without the zeros."""
    headroom: float | None = None
    """Powers of two between abs max and the dtype's largest number."""


SHOWN_STATISTICS = ("zeros", "zeros", True), ("subnormals", "subnormal", True)
"""(field, label, whether it is a share) of the statistics that text and page show in a frame where they are not 0."""

DTYPE_MAX = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2fnuz": 57344.0,
    "complex128": 1.7976931348623157e308,
    "complex64": 3.4028234663852886e38,
    "complex32": 65504.0,
}
"""The largest finite number of a dtype."""
DTYPES_OF_16_BITS = ("float16", "bfloat16")

MIN_NORMAL_BITS = {
    ValueEncoding.FLOAT64: 1 << 52,
    ValueEncoding.FLOAT32: 1 << 23,
    ValueEncoding.FLOAT16: 1 << 10,
    ValueEncoding.BFLOAT16: 1 << 7,
}
"""Bits of the smallest normal number. What lies between zero and it is subnormal."""


def headroom(abs_max: float | None, dtype: str) -> float | None:
    """Powers of two between the largest value and the dtype's largest number; None where that has no meaning.

    >>> headroom(32752.0, "float16")
    1.0
    """
    largest = DTYPE_MAX.get(dtype)
    if largest is None or abs_max is None or not 0 < abs_max < math.inf:
        return None
    return math.log2(largest) - math.log2(abs_max)


_FLOAT32 = int(ValueEncoding.FLOAT32)
_32_bits, _as_float32 = struct.Struct("<I").pack, struct.Struct("<f").unpack


def decode(bits: int, encoding: int) -> float:
    """Turn the sign-cleared bits of one element into a Python float."""
    if encoding == _FLOAT32:
        return float(_as_float32(_32_bits(bits))[0])
    if encoding == ValueEncoding.INTEGER:
        return float(bits)
    if encoding == ValueEncoding.FLOAT16:
        return float(struct.unpack("<e", struct.pack("<H", bits))[0])
    if encoding == ValueEncoding.BFLOAT16:
        return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
    if encoding == ValueEncoding.FLOAT64:
        return float(struct.unpack("<d", struct.pack("<Q", bits))[0])
    return math.nan


_WORDS = {NonFinite.NAN: "nan", NonFinite.POSINF: "+inf", NonFinite.NEGINF: "-inf", NonFinite.INF: "inf"}


def name_of(flags: NonFinite) -> str:
    """The word that a verdict uses: the worst of the flags.

    >>> name_of(NonFinite.NAN | NonFinite.POSINF)
    'nan'
    """
    return next((word for flag, word in _WORDS.items() if flags & flag), "finite")
