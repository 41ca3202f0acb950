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

from .kernel_elements import (
    E4M3FN,
    FLOAT64,
    INTEGER,
    LARGEST,
    UINT64,
    bad_from,
    bits_of,
    encoding_of,
    flags_of,
    normal_from,
    sizes_of,
    widened,
)

# LAYOUT: one run of elements; runs of equal length; else runs with too many elements for 32 bits.
DENSE = tl.constexpr(0)
RUNS = tl.constexpr(1)

COLUMNS = tl.constexpr(6)
ROWS = tl.constexpr(256)  # the power of two from VALUES_PER_SEGMENT on: rows of one buffer
ENTRY = tl.constexpr(8)  # columns of the table of `read_many`
NON_FINITE = tl.constexpr(7)
COUNTED = tl.constexpr(1 << 48)
SHARE = tl.constexpr(0xFFFF)


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
        sizes = sizes_of(bits_of(tl.load(source + _offsets(start + block, inner, stride, LAYOUT)), KIND), KIND)
        low = tl.minimum(low, tl.min(sizes, axis=0))
        high = tl.maximum(high, tl.max(sizes, axis=0))
        if COUNT:
            zeros += tl.sum((sizes == 0).to(tl.int32), axis=0)
            small += tl.sum((sizes < normal_from(KIND)).to(tl.int32), axis=0)
    if program == total // (DEEP * WIDE) % programs:  # the last, partial block is this program's
        for start in range(whole, total, WIDE):
            there = start + line < total
            raw = tl.load(source + _offsets(start + line, inner, stride, LAYOUT), mask=there, other=0)
            sizes = sizes_of(bits_of(raw, KIND), KIND)
            low = tl.where(there, tl.minimum(low, sizes), low)
            high = tl.where(there, tl.maximum(high, sizes), high)
            if COUNT:
                zeros += (there & (sizes == 0)).to(tl.int32)
                small += (there & (sizes < normal_from(KIND))).to(tl.int32)

    least = tl.cast(tl.min(low, axis=0), tl.int64)
    most = tl.cast(tl.max(high, axis=0), tl.int64)
    meta = tl.cast(0, tl.int64)
    if program == 0:
        meta += encoding_of(KIND) << 8
    if KIND != INTEGER and KIND != UINT64:
        if most >= bad_from(KIND):
            # Only here memory is read a second time, and only this program's share.
            found = tl.zeros([WIDE], tl.int32)
            for start in range(begin, total, step):
                for piece in range(0, DEEP * WIDE, WIDE):
                    index = start + piece + line
                    there = index < total
                    raw = tl.load(source + _offsets(index, inner, stride, LAYOUT), mask=there, other=0)
                    bits = bits_of(raw, KIND)
                    found |= tl.where(there, flags_of(bits, sizes_of(bits, KIND), KIND), 0)
            meta += tl.max(found & 1, axis=0) + tl.max(found & 2, axis=0) + tl.max(found & 4, axis=0)
    if KIND >= E4M3FN:
        least = widened(least, KIND)
        most = widened(most, KIND)
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
