from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from gpuwatch.core.values import (
    DTYPE_CODES,
    DTYPE_NAMES,
    INF_BITS,
    SIGN_MASK,
    Encoding,
    NonFinite,
    Value,
    decode,
    flags_from_bits,
    name_of,
)
from hypothesis import given
from hypothesis import strategies as st

NUMPY = {
    Encoding.FLOAT64: (np.uint64, np.float64),
    Encoding.FLOAT32: (np.uint32, np.float32),
    Encoding.FLOAT16: (np.uint16, np.float16),
}
FLOATS = [*NUMPY, Encoding.BFLOAT16]


def reference(bits: int, encoding: Encoding) -> float:
    if encoding is Encoding.BFLOAT16:
        return torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16).item()
    integer, floating = NUMPY[encoding]
    return float(np.array([bits], dtype=integer).view(floating)[0])


def same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


@given(encoding=st.sampled_from(FLOATS), data=st.data())
def test_any_bits_decode_as_numpy_and_torch_read_them(encoding, data):
    bits = data.draw(st.integers(0, SIGN_MASK[encoding]))
    assert same(decode(bits, encoding), reference(bits, encoding))


@pytest.mark.parametrize("encoding", FLOATS)
@pytest.mark.parametrize("offset", [0, 1, -1])
def test_borders_decode_exactly(encoding, offset):
    for border in (0, 1, INF_BITS[encoding], SIGN_MASK[encoding]):
        bits = border + offset
        if 0 <= bits <= SIGN_MASK[encoding]:
            assert same(decode(bits, encoding), reference(bits, encoding))


def test_the_smallest_bits_are_subnormals():
    assert decode(1, Encoding.FLOAT32) == 2.0**-149
    assert decode(1, Encoding.FLOAT16) == 2.0**-24
    assert decode(1, Encoding.BFLOAT16) == 2.0**-133
    assert decode(1, Encoding.FLOAT64) == 5e-324


@given(st.floats(width=32), st.floats(width=32))
def test_sign_cleared_bits_sort_as_absolute_values_with_nan_on_top(left, right):
    def bits(number: float) -> int:
        return struct.unpack("<I", struct.pack("<f", number))[0] & SIGN_MASK[Encoding.FLOAT32]

    def key(number: float) -> float:
        return math.inf if math.isnan(number) else abs(number)

    if math.isnan(left) != math.isnan(right):
        assert (bits(left) > bits(right)) == math.isnan(left)
    elif not math.isnan(left):
        assert (bits(left) < bits(right)) == (key(left) < key(right))


def test_integers_decode_as_themselves():
    assert decode(65504, Encoding.INTEGER) == 65504.0


def test_an_encoding_of_a_later_version_is_nan_and_no_error():
    assert math.isnan(decode(12, 250))


@pytest.mark.parametrize("encoding", FLOATS)
def test_high_bits_alone_tell_finite_inf_and_nan_apart(encoding):
    inf = INF_BITS[encoding]
    assert flags_from_bits(inf - 1, encoding) == NonFinite.NONE
    assert flags_from_bits(inf, encoding) == NonFinite.INF
    assert flags_from_bits(inf + 1, encoding) == NonFinite.NAN
    assert flags_from_bits(SIGN_MASK[encoding], encoding) == NonFinite.NAN


def test_integers_are_always_finite():
    assert flags_from_bits((1 << 63) - 1, Encoding.INTEGER) == NonFinite.NONE


def test_a_value_splits_its_meta_into_flags_and_encoding():
    value = Value(0x3F000000, 0x7F800000, Encoding.FLOAT32 << 8 | NonFinite.POSINF | NonFinite.NEGINF)
    assert value.flags == NonFinite.POSINF | NonFinite.NEGINF
    assert (value.abs_min, value.abs_max) == (0.5, math.inf)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (NonFinite.NONE, "finite"),
        (NonFinite.NAN | NonFinite.POSINF | NonFinite.NEGINF, "nan"),
        (NonFinite.POSINF | NonFinite.NEGINF, "+inf"),
        (NonFinite.NEGINF, "-inf"),
        (NonFinite.INF, "inf"),
    ],
)
def test_the_word_for_several_flags_is_the_worst(flags, word):
    assert name_of(flags) == word


def test_every_dtype_of_this_torch_that_a_model_may_hold_has_a_code():
    assert DTYPE_NAMES[0] == "unknown"
    assert len(DTYPE_CODES) == len(DTYPE_NAMES)
    for name in DTYPE_NAMES[1:]:
        if not name.startswith("q"):
            assert isinstance(getattr(torch, name), torch.dtype)


def test_the_table_of_dtypes_is_append_only():
    """Old recordings hold indexes into it."""
    assert DTYPE_NAMES[:8] == ("unknown", "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16")
    assert DTYPE_CODES["float8_e4m3fn"] == 14
    assert DTYPE_CODES["qint32"] == 24
