"""The elements of a tensor in the kernels of kernel.py: their bits, their sizes, and which of them are not finite."""
# Triton's language differs from Python: see kernel.py.
# mypy: ignore-errors
# ruff: noqa: SIM109

import triton
import triton.language as tl

# KIND: how the elements are read. The first five are the encodings of core/values.py.
INTEGER = tl.constexpr(0)
FLOAT64 = tl.constexpr(1)
FLOAT32 = tl.constexpr(2)
FLOAT16 = tl.constexpr(3)
BFLOAT16 = tl.constexpr(4)
UINT64 = tl.constexpr(5)
E4M3FN = tl.constexpr(6)
E5M2 = tl.constexpr(7)
E4M3FNUZ = tl.constexpr(8)
E5M2FNUZ = tl.constexpr(9)
E8M0FNU = tl.constexpr(10)
LARGEST = tl.constexpr(0x7FFF_FFFF_FFFF_FFFF)
QUIET_NAN = tl.constexpr(0x7FC0_0000)


@triton.jit
def bits_of(raw, KIND: tl.constexpr):
    """The elements as signed integers."""
    if KIND == FLOAT64:
        bits = raw.to(tl.int64, bitcast=True)
    elif KIND == FLOAT32:
        bits = raw.to(tl.int32, bitcast=True)
    elif KIND == FLOAT16 or KIND == BFLOAT16:
        bits = raw.to(tl.int16, bitcast=True).to(tl.int32)
    elif KIND == INTEGER:
        bits = raw.to(tl.int64)
    elif KIND == UINT64:
        bits = raw  # read as int64
    else:
        bits = raw.to(tl.int32)  # float8, read as int8
    return bits


@triton.jit
def sizes_of(bits, KIND: tl.constexpr):
    """Integers that sort like the absolute values: finite ones, then inf, then nan."""
    if KIND == INTEGER:
        positive = tl.where(bits < 0, -bits, bits)
        sizes = tl.where(positive < 0, LARGEST, positive)  # -x of the smallest int64 overflows
    elif KIND == UINT64:
        sizes = tl.where(bits < 0, LARGEST, bits)  # the recorder's largest integer
    elif KIND == FLOAT64:
        sizes = bits & LARGEST
    elif KIND == FLOAT32:
        sizes = bits & 0x7FFFFFFF
    elif KIND == FLOAT16 or KIND == BFLOAT16:
        sizes = bits & 0x7FFF
    elif KIND == E8M0FNU:
        sizes = bits & 0xFF
    elif KIND == E4M3FNUZ or KIND == E5M2FNUZ:
        sizes = tl.where(bits == -128, 0x80, bits & 0x7F)  # the bits of -0 mean nan
    else:
        sizes = bits & 0x7F
    return sizes


@triton.jit
def bad_from(KIND: tl.constexpr):
    """The smallest size that is not finite: inf if the dtype has it, else nan."""
    if KIND == FLOAT64:
        least = 0x7FF0_0000_0000_0000
    elif KIND == FLOAT32:
        least = 0x7F800000
    elif KIND == FLOAT16:
        least = 0x7C00
    elif KIND == BFLOAT16:
        least = 0x7F80
    elif KIND == E4M3FN:
        least = 0x7F
    elif KIND == E5M2:
        least = 0x7C
    elif KIND == E8M0FNU:
        least = 0xFF
    else:
        least = 0x80
    return least


@triton.jit
def encoding_of(KIND: tl.constexpr):
    """The encoding of the row's `low` and `high`. A float8 is recorded as the float32 of the same value."""
    if KIND == UINT64:
        encoding = 0
    elif KIND >= E4M3FN:
        encoding = 2
    else:
        encoding = KIND
    return encoding


@triton.jit
def normal_from(KIND: tl.constexpr):
    """The size of the smallest normal number, for the dtypes of low precision."""
    if KIND == FLOAT16:
        least = 1 << 10
    elif KIND == BFLOAT16:
        least = 1 << 7
    elif KIND == E4M3FN or KIND == E4M3FNUZ:
        least = 1 << 3
    else:
        least = 1 << 2
    return least


@triton.jit
def flags_of(bits, sizes, KIND: tl.constexpr):
    """core.values.NonFinite of each element."""
    least_bad = bad_from(KIND)
    if ((KIND == FLOAT64 or KIND == FLOAT32) or (KIND == FLOAT16 or KIND == BFLOAT16)) or KIND == E5M2:
        sign = tl.where(bits < 0, 4, 2)
        flags = tl.where(sizes > least_bad, 1, tl.where(sizes == least_bad, sign, 0))
    else:
        flags = tl.where(sizes >= least_bad, 1, 0)
    return flags


@triton.jit
def widened(code, KIND: tl.constexpr):
    """The float32 bits of one float8 size."""
    if KIND == E8M0FNU:
        bits = tl.where(code == 0, 1 << 22, code << 23)
    else:
        if KIND == E4M3FN:
            mantissa: tl.constexpr = 3
            bias: tl.constexpr = 7
        elif KIND == E5M2:
            mantissa: tl.constexpr = 2
            bias: tl.constexpr = 15
        elif KIND == E4M3FNUZ:
            mantissa: tl.constexpr = 3
            bias: tl.constexpr = 8
        else:
            mantissa: tl.constexpr = 2
            bias: tl.constexpr = 16
        exponent = code >> mantissa
        fraction = code & ((1 << mantissa) - 1)
        normal = (exponent + (127 - bias)) << 23 | fraction << (23 - mantissa)
        # A subnormal is a multiple of the smallest one, and float32 represents it exactly.
        smallest = tl.cast((128 - bias - mantissa) << 23, tl.int32).to(tl.float32, bitcast=True)
        subnormal = (fraction.to(tl.float32) * smallest).to(tl.int32, bitcast=True).to(tl.int64)
        bits = tl.where(exponent == 0, subnormal, normal)
    infinite = 0x7F800000 if KIND == E5M2 else QUIET_NAN
    return tl.where(code > bad_from(KIND), QUIET_NAN, tl.where(code == bad_from(KIND), infinite, bits))
