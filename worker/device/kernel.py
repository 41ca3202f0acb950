"""The Triton kernels of triton_reader.py: `read` reads a tensor into a row on its device, `read_many` reads many
tensors into a row each, and `pack` packs rows.

Importing this module imports Triton, which only torch's CUDA wheels include. A row is six integers of 8 bytes, and
starts as (`LARGEST`, 0, 0, 0, 0, 0):

    low, high, meta, zeros, subnormals, elements among which these were counted

Every program of a launch reduces its share of a tensor and merges the result into the row with integer atomics, in any
order (`_merge`). A finite tensor is read once. A program that finds inf or nan reads its own share again, to tell them
apart and to find the signs.
"""
# Triton's language differs from Python: some parameters are constants, types are values, the module has no stubs, there
# is no `in` and no chain of `or`, and a condition on constants is an `if` of its own, which is decided at compilation.
# mypy: ignore-errors
# ruff: noqa: SIM102, SIM109

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

# LAYOUT: one run of elements; runs of equal length; else runs with too many elements for 32 bits.
DENSE = tl.constexpr(0)
RUNS = tl.constexpr(1)

COLUMNS = tl.constexpr(6)
ROWS = tl.constexpr(256)  # the power of two from VALUES_PER_SEGMENT on: rows of one buffer
ENTRY = tl.constexpr(8)  # columns of the table of `read_many`
NON_FINITE = tl.constexpr(7)
LARGEST = tl.constexpr(0x7FFF_FFFF_FFFF_FFFF)
QUIET_NAN = tl.constexpr(0x7FC0_0000)
COUNTED = tl.constexpr(1 << 48)
SHARE = tl.constexpr(0xFFFF)


@triton.jit
def _bits(raw, KIND: tl.constexpr):
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
def _sizes(bits, KIND: tl.constexpr):
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
def _bad_from(KIND: tl.constexpr):
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
def _encoding(KIND: tl.constexpr):
    """The encoding of the row's `low` and `high`. A float8 is recorded as the float32 of the same value."""
    if KIND == UINT64:
        encoding = 0
    elif KIND >= E4M3FN:
        encoding = 2
    else:
        encoding = KIND
    return encoding


@triton.jit
def _normal_from(KIND: tl.constexpr):
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
def _flags(bits, sizes, KIND: tl.constexpr):
    """core.values.NonFinite of each element."""
    bad_from = _bad_from(KIND)
    if ((KIND == FLOAT64 or KIND == FLOAT32) or (KIND == FLOAT16 or KIND == BFLOAT16)) or KIND == E5M2:
        sign = tl.where(bits < 0, 4, 2)
        flags = tl.where(sizes > bad_from, 1, tl.where(sizes == bad_from, sign, 0))
    else:
        flags = tl.where(sizes >= bad_from, 1, 0)
    return flags


@triton.jit
def _widened(code, KIND: tl.constexpr):
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
    return tl.where(code > _bad_from(KIND), QUIET_NAN, tl.where(code == _bad_from(KIND), infinite, bits))


@triton.jit
def _offsets(index, inner, stride, LAYOUT: tl.constexpr):
    """Offsets of elements. The memory is one run, or runs of `inner` elements that begin `stride` apart."""
    if LAYOUT == DENSE:
        offsets = index
    elif LAYOUT == RUNS:
        narrow = index.to(tl.uint32)  # there are fewer than 2**31 elements: division is four times as fast
        length = inner.to(tl.uint32)
        offsets = (narrow // length).to(tl.int64) * stride + (narrow % length).to(tl.int64)
    else:
        offsets = (index // inner) * stride + index % inner
    return offsets


@triton.jit
def _merge(
    source,
    row,
    program,
    programs,
    total,
    inner,
    stride,
    KIND: tl.constexpr,
    COUNT: tl.constexpr,
    LAYOUT: tl.constexpr,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Merge one program's share of `total` elements into a row. There are `programs` programs.

    A block is DEEP x WIDE elements: each thread issues DEEP loads at a time and reduces over them.
    """
    line = tl.arange(0, WIDE)
    block = tl.arange(0, DEEP)[:, None] * WIDE + line[None, :]
    begin = tl.cast(program, tl.int64) * (DEEP * WIDE)
    step = tl.cast(programs, tl.int64) * (DEEP * WIDE)
    whole = total // (DEEP * WIDE) * (DEEP * WIDE)

    if (KIND == INTEGER or KIND == UINT64) or KIND == FLOAT64:
        low = tl.full([WIDE], LARGEST, tl.int64)
        high = tl.zeros([WIDE], tl.int64)
    else:
        low = tl.full([WIDE], 0x7FFFFFFF, tl.int32)
        high = tl.zeros([WIDE], tl.int32)
    zeros = tl.zeros([WIDE], tl.int32)
    small = tl.zeros([WIDE], tl.int32)
    for start in range(begin, whole, step):
        sizes = _sizes(_bits(tl.load(source + _offsets(start + block, inner, stride, LAYOUT)), KIND), KIND)
        low = tl.minimum(low, tl.min(sizes, axis=0))
        high = tl.maximum(high, tl.max(sizes, axis=0))
        if COUNT:
            zeros += tl.sum((sizes == 0).to(tl.int32), axis=0)
            small += tl.sum((sizes < _normal_from(KIND)).to(tl.int32), axis=0)
    if program == total // (DEEP * WIDE) % programs:  # the last, partial block is this program's
        for start in range(whole, total, WIDE):
            there = start + line < total
            raw = tl.load(source + _offsets(start + line, inner, stride, LAYOUT), mask=there, other=0)
            sizes = _sizes(_bits(raw, KIND), KIND)
            low = tl.where(there, tl.minimum(low, sizes), low)
            high = tl.where(there, tl.maximum(high, sizes), high)
            if COUNT:
                zeros += (there & (sizes == 0)).to(tl.int32)
                small += (there & (sizes < _normal_from(KIND))).to(tl.int32)

    least = tl.cast(tl.min(low, axis=0), tl.int64)
    most = tl.cast(tl.max(high, axis=0), tl.int64)
    meta = tl.cast(0, tl.int64)
    if program == 0:
        meta += _encoding(KIND) << 8
    if KIND != INTEGER and KIND != UINT64:
        if most >= _bad_from(KIND):
            # Only here memory is read a second time, and only this program's share.
            found = tl.zeros([WIDE], tl.int32)
            for start in range(begin, total, step):
                for piece in range(0, DEEP * WIDE, WIDE):
                    index = start + piece + line
                    there = index < total
                    raw = tl.load(source + _offsets(index, inner, stride, LAYOUT), mask=there, other=0)
                    bits = _bits(raw, KIND)
                    found |= tl.where(there, _flags(bits, _sizes(bits, KIND), KIND), 0)
            meta += tl.max(found & 1, axis=0) + tl.max(found & 2, axis=0) + tl.max(found & 4, axis=0)
    if KIND >= E4M3FN:
        least = _widened(least, KIND)
        most = _widened(most, KIND)
    tl.atomic_min(row, least, sem="relaxed")
    tl.atomic_max(row + 1, most, sem="relaxed")
    tl.atomic_or(row + 2, meta, mask=meta != 0, sem="relaxed")
    if COUNT:
        number = tl.sum(zeros.to(tl.int64), axis=0)
        tl.atomic_add(row + 3, number, mask=number != 0, sem="relaxed")
        number = tl.sum(small.to(tl.int64), axis=0) - number
        tl.atomic_add(row + 4, number, mask=number != 0, sem="relaxed")
        if program == 0:
            tl.store(row + 5, total)


@triton.jit(do_not_specialize=["position", "count", "inner", "stride"])
def read(
    source,
    rows,
    position,
    count,
    inner,
    stride,
    KIND: tl.constexpr,
    COUNT: tl.constexpr,
    LAYOUT: tl.constexpr,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Merge `count` elements into the row at `position`."""
    row = rows + position * COLUMNS
    total, inner, stride = tl.cast(count, tl.int64), tl.cast(inner, tl.int64), tl.cast(stride, tl.int64)
    program, programs = tl.program_id(0), tl.num_programs(0)
    _merge(source, row, program, programs, total, inner, stride, KIND, COUNT, LAYOUT, DEEP, WIDE)


@triton.jit(do_not_specialize=["position", "count", "others", "first"])
def read_two(
    source,
    other,
    rows,
    position,
    count,
    others,
    first,
    ELEMENT: tl.constexpr,
    KIND: tl.constexpr,
    COUNT: tl.constexpr,
    LAYOUT: tl.constexpr,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Merge `count` elements into the row at `position`, and `others` of `other` into the next one.

    The `first` programs do the former. Both lie in one piece, at addresses that 16 divides.
    """
    at = tl.cast(tl.program_id(0) >= first, tl.int32)
    address = tl.where(at == 0, tl.cast(source, tl.int64), tl.cast(other, tl.int64))
    memory = tl.multiple_of(tl.cast(address, tl.pointer_type(ELEMENT)), 16)
    total = tl.cast(tl.where(at == 0, count, others), tl.int64)
    programs = tl.where(at == 0, first, tl.num_programs(0) - first)
    row = rows + (position + at) * COLUMNS
    _merge(memory, row, tl.program_id(0) - at * first, programs, total, total, total, KIND, COUNT, LAYOUT, DEEP, WIDE)


@triton.jit
def _is_finite_before(rows, earlier, position):
    """Whether no row before `position` is non-finite.

    A row whose weight was read before counts with the numbers of that time. So all programs of all launches find the
    same, whether they run before or after those rows are written.
    """
    index = tl.arange(0, ROWS)
    before = index < position
    place = tl.load(earlier + index, mask=before, other=0)
    here = tl.load(rows + index * COLUMNS + 2, mask=before & (place == 0), other=0)
    then = tl.load(tl.cast(place, tl.pointer_type(tl.int64)) + 2, mask=place != 0, other=0)
    return tl.max((here | then) & NON_FINITE, axis=0) == 0


@triton.jit(do_not_specialize=["number"])
def read_many(
    table,
    earlier,
    rows,
    number,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    COUNT: tl.constexpr,
    LAYOUT: tl.constexpr,
    DEEP: tl.constexpr,
    WIDE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Merge `number` tensors into a row each. Each has programs of its own, one after the other.

    An entry of the table is: first program, programs, address, position of the row, elements, inner, stride, and with
    KEEP a position: the tensor keeps the numbers at the address `earlier[position of the row]`, unless a row before
    that position is non-finite.
    """
    index = tl.arange(0, ROWS)
    firsts = tl.load(table + index * ENTRY, mask=index < number, other=LARGEST)
    entry = table + (tl.sum((firsts <= tl.program_id(0)).to(tl.int32), axis=0) - 1) * ENTRY
    program = tl.program_id(0) - tl.load(entry)
    position = tl.load(entry + 3)
    row = rows + position * COLUMNS
    kept = False
    if KEEP:
        kept = _is_finite_before(rows, earlier, tl.load(entry + 7))
    if kept:
        if program == 0:
            known = tl.cast(tl.load(earlier + position), tl.pointer_type(tl.int64))
            tl.store(row, tl.load(known))
            tl.store(row + 1, tl.load(known + 1))
            tl.store(row + 2, tl.load(known + 2))
    else:
        source = tl.cast(tl.load(entry + 2), tl.pointer_type(ELEMENT))
        if ALIGNED:
            source = tl.multiple_of(source, 16)
        programs, total = tl.load(entry + 1), tl.load(entry + 4)
        inner, stride = tl.load(entry + 5), tl.load(entry + 6)
        _merge(source, row, program, programs, total, inner, stride, KIND, COUNT, LAYOUT, DEEP, WIDE)


@triton.jit
def _share(number, total):
    """`number` of `total` as an integer of 16 bits, rounded to even. It is 0 only if `number` is 0."""
    exact = number.to(tl.float64) / total.to(tl.float64) * SHARE
    share = exact.to(tl.int64)
    rest = exact - share.to(tl.float64)
    up = (rest > 0.5) | ((rest == 0.5) & (share % 2 == 1))
    share += up.to(tl.int64)
    return tl.where((number > 0) & (share == 0), 1, share)


@triton.jit(do_not_specialize=["count"])
def pack(rows, packed, count, BLOCK: tl.constexpr):
    """Convert `count` rows to the recorder's form (low, high, meta), and reset them."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = index < count
    row = rows + index * COLUMNS
    low = tl.load(row, mask=there, other=0)
    high = tl.load(row + 1, mask=there, other=0)
    meta = tl.load(row + 2, mask=there, other=0)
    zeros = tl.load(row + 3, mask=there, other=0)
    subnormals = tl.load(row + 4, mask=there, other=0)
    total = tl.load(row + 5, mask=there, other=0)
    divisor = tl.where(total > 0, total, 1)
    shares = _share(zeros, divisor) << 16 | _share(subnormals, divisor) << 32 | COUNTED
    meta = tl.where(total > 0, meta | shares, meta)
    target = packed + index * 3
    tl.store(target, low, mask=there)
    tl.store(target + 1, high, mask=there)
    tl.store(target + 2, meta, mask=there)
    nothing = tl.zeros([BLOCK], tl.int64)
    tl.store(row, nothing + LARGEST, mask=there)
    for column in tl.static_range(1, COLUMNS):
        tl.store(row + column, nothing, mask=there)


def element(dtype):
    """Triton's type for elements of a dtype of torch."""
    return getattr(tl, str(dtype).removeprefix("torch."))


INTERPRETED = not isinstance(read, triton.JITFunction)
"""Triton runs its kernels on the CPU (TRITON_INTERPRET=1)."""
