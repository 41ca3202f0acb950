from __future__ import annotations

import doctest
import math
import struct

import numpy as np
import pytest
import torch
from gpuwatch.core import values
from gpuwatch.core.values import (
    COUNTED,
    DTYPE_CODES,
    DTYPE_MAX,
    DTYPE_NAMES,
    INF_BITS,
    MIN_NORMAL_BITS,
    PENDING,
    SHARE,
    SIGN_MASK,
    NonFinite,
    Value,
    ValueEncoding,
    decode,
    headroom,
    name_of,
)
from hypothesis import given
from hypothesis import strategies as st
from needs import RELEASE

NUMPY = {
    ValueEncoding.FLOAT64: (np.uint64, np.float64),
    ValueEncoding.FLOAT32: (np.uint32, np.float32),
    ValueEncoding.FLOAT16: (np.uint16, np.float16),
}
FLOATS = [*NUMPY, ValueEncoding.BFLOAT16]


def reference(bits: int, encoding: ValueEncoding) -> float:
    if encoding is ValueEncoding.BFLOAT16:
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
    assert decode(1, ValueEncoding.FLOAT32) == 2.0**-149
    assert decode(1, ValueEncoding.FLOAT16) == 2.0**-24
    assert decode(1, ValueEncoding.BFLOAT16) == 2.0**-133
    assert decode(1, ValueEncoding.FLOAT64) == 5e-324


@given(st.floats(width=32), st.floats(width=32))
def test_sign_cleared_bits_sort_as_absolute_values_with_nan_on_top(left, right):
    def bits(number: float) -> int:
        return struct.unpack("<I", struct.pack("<f", number))[0] & SIGN_MASK[ValueEncoding.FLOAT32]

    def key(number: float) -> float:
        return math.inf if math.isnan(number) else abs(number)

    if math.isnan(left) != math.isnan(right):
        assert (bits(left) > bits(right)) == math.isnan(left)
    elif not math.isnan(left):
        assert (bits(left) < bits(right)) == (key(left) < key(right))


def test_integers_decode_as_themselves():
    assert decode(65504, ValueEncoding.INTEGER) == 65504.0


def test_an_encoding_of_a_later_version_is_nan_and_no_error():
    assert math.isnan(decode(12, 250))


def test_a_value_splits_its_meta_into_flags_and_encoding():
    value = Value(0x3F000000, 0x7F800000, ValueEncoding.FLOAT32 << 8 | NonFinite.POSINF | NonFinite.NEGINF)
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
        if not name.startswith("q") and (hasattr(torch, name) or RELEASE >= (2, 8)):
            assert isinstance(getattr(torch, name), torch.dtype)


def test_the_table_of_dtypes_is_append_only():
    """Old recordings hold indexes into it."""
    assert DTYPE_NAMES[:8] == ("unknown", "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16")
    assert DTYPE_CODES["float8_e4m3fn"] == 14
    assert DTYPE_CODES["qint32"] == 24


# -- shares -------------------------------------------------------------------------------------------------------


@given(
    flags=st.integers(0, 15),
    encoding=st.sampled_from(ValueEncoding),
    zeros=st.integers(0, SHARE),
    subnormals=st.integers(0, SHARE),
)
def test_flags_encoding_and_shares_do_not_touch_each_other(flags, encoding, zeros, subnormals):
    meta = flags | encoding << 8 | zeros << 16 | subnormals << 32 | COUNTED
    assert 0 <= meta < 1 << 63, "it is stored as a signed integer of 8 bytes"
    value = Value(1, 2, struct.unpack("<q", struct.pack("<q", meta))[0])
    assert (value.flags, value.encoding) == (flags, encoding)
    assert (value.zeros, value.subnormals) == (zeros / SHARE, subnormals / SHARE)
    assert (value.abs_min, value.abs_max) == (decode(1, encoding), decode(2, encoding))


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_share_comes_back_as_near_as_16_bits_can_hold_it(zeros, subnormals):
    value = Value(0, 0, round(zeros * SHARE) << 16 | round(subnormals * SHARE) << 32 | COUNTED)
    assert value.zeros == pytest.approx(zeros, abs=0.5 / SHARE + 1e-12)
    assert value.subnormals == pytest.approx(subnormals, abs=0.5 / SHARE + 1e-12)


def test_none_and_all_are_exact():
    value = Value(0, 0, SHARE << 16 | COUNTED)
    assert (value.zeros, value.subnormals) == (1.0, 0.0)


@pytest.mark.parametrize("meta", [PENDING, ValueEncoding.FLOAT16 << 8, ValueEncoding.FLOAT16 << 8 | 0xFFFF << 16])
def test_where_nobody_counted_there_are_no_shares(meta):
    assert (Value(0, 0, meta).zeros, Value(0, 0, meta).subnormals) == (None, None)


# -- headroom and underflow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPE_MAX)
def test_the_largest_number_of_a_dtype_is_torchs(name):
    assert torch.finfo(getattr(torch, name)).max == DTYPE_MAX[name]


def test_every_dtype_with_an_exponent_and_a_sign_has_a_largest_number():
    """float8_e8m0fnu is a scale, and holds no value that could overflow."""
    floats = {
        name
        for name in DTYPE_NAMES
        if isinstance(dtype := getattr(torch, name, None), torch.dtype)
        and (dtype.is_floating_point or dtype.is_complex)
    }
    assert floats - {"float8_e8m0fnu"} == set(DTYPE_MAX)


DTYPES = {
    ValueEncoding.FLOAT64: torch.float64,
    ValueEncoding.FLOAT32: torch.float32,
    ValueEncoding.FLOAT16: torch.float16,
    ValueEncoding.BFLOAT16: torch.bfloat16,
}


@pytest.mark.parametrize("encoding", FLOATS)
def test_the_smallest_number_of_full_precision_is_torchs(encoding):
    assert decode(MIN_NORMAL_BITS[encoding], encoding) == torch.finfo(DTYPES[encoding]).smallest_normal
    assert decode(MIN_NORMAL_BITS[encoding] - 1, encoding) < torch.finfo(DTYPES[encoding]).smallest_normal


def test_every_encoding_of_floats_has_its_borders():
    floats = set(ValueEncoding) - {ValueEncoding.INTEGER}
    assert set(MIN_NORMAL_BITS) == set(INF_BITS) == set(SIGN_MASK) == set(DTYPES) == floats


@pytest.mark.parametrize("name", DTYPE_MAX)
def test_the_largest_number_has_no_headroom_and_its_half_one_power_of_two(name):
    assert headroom(DTYPE_MAX[name], name) == 0
    assert headroom(DTYPE_MAX[name] / 2, name) == pytest.approx(1, abs=1e-12)
    assert headroom(DTYPE_MAX[name] / 1024, name) == pytest.approx(10, abs=1e-12)


@given(st.floats(min_value=5e-324, max_value=DTYPE_MAX["float64"]))
def test_headroom_is_a_number_for_every_finite_value_above_zero(value):
    assert 0 <= headroom(value, "float64") < 2100


@pytest.mark.parametrize("value", [None, 0.0, math.inf, math.nan])
def test_what_is_no_finite_number_above_zero_has_no_headroom(value):
    assert headroom(value, "float16") is None


@pytest.mark.parametrize("name", ["int64", "bool", "unknown", "qint8", "float4 of a later version"])
def test_a_dtype_that_cannot_overflow_to_inf_has_no_headroom(name):
    assert headroom(1.0, name) is None


def test_the_examples_in_the_docstrings_hold():
    found = doctest.testmod(values)
    assert found.attempted > 0
    assert found.failed == 0
