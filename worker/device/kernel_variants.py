"""Which compiled kernel a call runs: the key of a call, the constants of a kernel, and the launches of many tensors."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import Any

import torch

from ..record.float_formats import LOW_PRECISION
from .grouped_readings import ENTRY
from .tensor_source import DTYPES, KINDS, KernelDtype, TensorSource

INT32 = 1 << 31
BLOCKS = 8
"""Blocks that a program of `read_many` reads, one after the other."""


def tables(
    entries: bytes, share_of: Callable[[int], int], most: int, rows: int
) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    """The launches that read GroupedReadings' entries: (variant, programs, table) of each; and before these a list with
    the address of each row's earlier numbers, 0 if it has none. See `read_many` in kernel.py.

    A tensor gets a program for each `share_of(variant)` of its elements, `most` at most. `rows`: how long the list is.
    worker/native has the same in C.
    """
    kept = array("q", bytes(8 * rows))
    programs: dict[int, int] = {}
    found: dict[int, list[bytes]] = {}
    for code, counted, position, address, elements, inner, stride, earlier in ENTRY.iter_unpack(entries):
        kept[position] = earlier
        layout = layout_of(elements, stride)
        variant = code << 8 | layout << 3 | counted << 2 | (address % 16 == 0) << 1 | (earlier != 0)
        first = programs.get(variant, 0)
        own = max(1, min(-(-elements // share_of(variant)), most))
        programs[variant] = first + own
        before = position if address else 0
        found.setdefault(variant, []).append(ENTRY.pack(first, own, address, position, elements, inner, stride, before))
    return kept.tobytes(), [(variant, programs[variant], b"".join(parts)) for variant, parts in found.items()]


def parts_of(variant: int) -> tuple[torch.dtype, bool, int]:
    """Arguments of `constants_of`."""
    return DTYPES[variant >> 8], bool(variant & 4), variant >> 3 & 3


@functools.cache
def share_of(variant: int) -> int:
    """Elements that a program of `read_many` reads."""
    return constants_of(*parts_of(variant))[1] * BLOCKS


def layout_of(elements: int, stride: int) -> int:
    """The kernels' LAYOUT."""
    return 0 if stride == 0 else 1 if elements < INT32 else 2


@functools.cache
def constants_of(dtype: torch.dtype, count: bool, layout: int) -> tuple[KernelDtype, int, tuple[Any, ...]]:
    """(how a dtype is read, elements in a block, the kernels' constants KIND, COUNT, LAYOUT, DEEP and WIDE)"""
    kind = KINDS[dtype]
    deep = kind.deep if layout == 0 else 1
    return kind, deep * kind.wide, (kind.code, count and dtype in LOW_PRECISION, layout, deep, kind.wide)


def kernel_text(key: Any) -> str:
    """The key of a kernel, in words.

    >>> kernel_text((torch.float16, True, 0, True, True, False, None))
    'read of float16 with holes'
    """
    if key[1] == "pack":
        return "pack"
    with_holes = key[-2] is False
    name, dtype = "read", key[0]
    if key[0] == "two":
        name, dtype, with_holes = "read_two", key[1], False
    if key[1] == "many":
        dtype, _, layout = parts_of(key[2])
        name, with_holes = "read_many", layout != 0
    return f"{name} of {str(dtype).removeprefix('torch.')}{' with holes' if with_holes else ''}"


def key_of(source: TensorSource, rows: torch.Tensor, count: bool) -> tuple[Any, ...]:
    """The key of a call that reads one tensor."""
    tensor, elements, inner, stride = source
    target, device = rows.data_ptr(), tensor.get_device()
    return read_key(tensor.dtype, count, device, tensor.data_ptr(), target, elements, inner, stride)


def key_of_two(source: TensorSource, rows: torch.Tensor, count: bool) -> tuple[Any, ...]:
    """The key of a call that reads two tensors which are alike."""
    return "two", source.tensor.dtype, count, rows.get_device()


def read_key(
    dtype: torch.dtype, count: bool, device: int, address: int, target: int, elements: int, inner: int, stride: int
) -> tuple[Any, ...]:
    """The key of a call of `kernel.read`. Calls with the same key run the same compiled kernel. `launch_reads` makes
    the same key in C.

    Triton compiles a kernel for the types of the arguments (an integer has 32 or 64 bits), for whether 16 divides each
    pointer, and for the values of the constants. These follow from `dtype`, `count` and the layout.
    """
    wide = elements >= INT32 or inner >= INT32 or stride >= INT32
    sizes = (elements < INT32, inner < INT32, stride < INT32) if wide else None
    return dtype, count, device, address % 16 == 0, target % 16 == 0, stride == 0, sizes
