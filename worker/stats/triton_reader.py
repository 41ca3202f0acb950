"""Reads a tensor into a row on its device with the kernels of kernel.py, at little cost for the host.

For each launch, Triton binds the arguments, derives a key from them and looks up the compiled kernel. That takes
several times as long as the driver's launch. Here the key holds only the arguments that can differ, and the compiled
kernel is launched directly.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Callable
from typing import Any

import torch

from .device import without_modes
from .tensor_stats import LOW_PRECISION
from .torch_reader import DTYPES, ENTRY, KINDS, GroupedReadings, KernelDtype, TensorSource

try:
    from ..native.core import tables as _native_tables
except ImportError:  # gpuwatch was installed without a C compiler
    _native_tables = None  # type: ignore[assignment]

_OLDEST, _NEWEST = (3, 3), (3, 9)
"""The Triton versions whose compiled kernels take all arguments, constants included, in this order.

A compiled kernel does not check the number of its arguments, so other versions are launched in the ordinary way.
"""
_OPTIONS = {"enable_fp_fusion": True}
"""The options of an ordinary launch. The kernels multiply no floats; without it, Triton 3.9 warns the script."""
_INT32 = 1 << 31
_PACK_BLOCK = 128
_ROWS, _ENTRY = 256, 8
"""As in kernel.py: the longest list of rows, and the columns of the table of `read_many`."""
_BLOCKS = 8
"""Blocks that a program of `read_many` reads, one after the other."""


class TritonReader:
    """See `Reader`. Raises ImportError without Triton. The first launches may raise any exception."""

    def __init__(self, kernel: Any = None, version: str = "") -> None:
        if kernel is None:
            from . import kernel as ours

            kernel, version = ours, ours.VERSION
        self._kernel = kernel
        self._is_direct = _OLDEST <= _release(version) <= _NEWEST
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._reads: dict[tuple[Any, ...], tuple[Any, int, int, tuple[Any, ...]]] = {}
        """Key of a read -> (compiled kernel, elements in a block, most programs, constants)"""
        self._programs: dict[torch.device, int] = {}
        self.interpreted: bool = kernel.INTERPRETED

    def read(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> None:
        """See `Reader`. The device must be the current one."""
        tensor, elements, inner, stride = source
        address, target = tensor.data_ptr(), rows.data_ptr()
        key = read_key(tensor.dtype, count, tensor.get_device(), address, target, elements, inner, stride)
        known = self._reads.get(key)
        if known is None:
            without_modes(self._first_read, key, source, rows, position, count)
            return
        compiled, block, most, constants = known
        programs = min(-(-elements // block), most)
        compiled[programs, 1, 1](address, target, position, elements, inner, stride, *constants)

    def _first_read(self, key: Any, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> None:
        """An ordinary launch, which compiles the kernel where Triton has not done so yet."""
        tensor, elements, inner, stride = source
        kind, block, constants = _constants(tensor.dtype, count, layout_of(elements, stride))
        most = self._most_programs(tensor.device)
        view = tensor if kind.read_as is tensor.dtype else tensor.view(kind.read_as)
        launch = self._kernel.read[(min(-(-elements // block), most),)]
        compiled = launch(view, rows, position, elements, inner, stride, *constants, **_OPTIONS)
        if self._is_direct and compiled is not None:
            self._reads[key] = compiled, block, most, constants

    def read_many(self, readings: GroupedReadings, rows: torch.Tensor) -> None:
        """See `Reader`. One launch for all tensors of one dtype and layout, as torch's foreach operations do it.

        A table on the device says which programs read which tensor. It is copied there without waiting.
        """
        device = rows.device
        make = tables if _native_tables is None else _native_tables
        earlier, groups = make(readings.entries, _share_of, self._most_programs(device), _ROWS)
        table = _on(device, b"".join([earlier, *(entries for _, _, entries in groups)]))
        at = _ROWS
        for variant, programs, entries in groups:
            kind, _, constants = _constants(*_parts_of(variant))
            tensors = table[at:], table, rows
            addresses = [each.data_ptr() for each in tensors]
            number = len(entries) // ENTRY.size
            arguments = number, self._kernel.element(kind.read_as), bool(variant & 2), *constants, bool(variant & 1)
            key = device, "many", variant, *(each % 16 == 0 for each in addresses)
            compiled = self._compiled.get(key)
            if compiled is not None:
                compiled[programs, 1, 1](*addresses, *arguments)
            else:
                self._keep(key, self._kernel.read_many[(programs,)](*tensors, *arguments, **_OPTIONS))
            at += number * _ENTRY

    def pack(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """See `Reader`."""
        packed = rows.new_empty(count, 3)
        programs = -(-count // _PACK_BLOCK)
        address, target = rows.data_ptr(), packed.data_ptr()
        key = (rows.device, "pack", address % 16 == 0, target % 16 == 0)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[programs, 1, 1](address, target, count, _PACK_BLOCK)
        else:
            self._keep(key, self._kernel.pack[(programs,)](rows, packed, count, _PACK_BLOCK, **_OPTIONS))
        return packed

    def _keep(self, key: tuple[Any, ...], compiled: Any) -> None:
        """Cache the compiled kernel, which an ordinary launch returns."""
        if self._is_direct and compiled is not None:
            self._compiled[key] = compiled

    def _most_programs(self, device: torch.device) -> int:
        """As many as keep the device's memory busy: a tensor gets no more."""
        most = self._programs.get(device)
        if most is None:
            most = 3
            if device.type == "cuda":
                most = 4 * torch.cuda.get_device_properties(device).multi_processor_count
            self._programs[device] = most
        return most


def tables(
    entries: bytes, share_of: Callable[[int], int], most: int, rows: int
) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    """The launches that read the entries of Readings: (variant, programs, table) of each; and before these a list with
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


def _parts_of(variant: int) -> tuple[torch.dtype, bool, int]:
    """Arguments of `_constants`."""
    return DTYPES[variant >> 8], bool(variant & 4), variant >> 3 & 3


@functools.cache
def _share_of(variant: int) -> int:
    """Elements that a program of `read_many` reads."""
    return _constants(*_parts_of(variant))[1] * _BLOCKS


def layout_of(elements: int, stride: int) -> int:
    """The kernels' LAYOUT."""
    return 0 if stride == 0 else 1 if elements < _INT32 else 2


@functools.cache
def _constants(dtype: torch.dtype, count: bool, layout: int) -> tuple[KernelDtype, int, tuple[Any, ...]]:
    """(how a dtype is read, elements in a block, the kernels' constants KIND, COUNT, LAYOUT, DEEP and WIDE)"""
    kind = KINDS[dtype]
    deep = kind.deep if layout == 0 else 1
    return kind, deep * kind.wide, (kind.code, count and dtype in LOW_PRECISION, layout, deep, kind.wide)


def _on(device: torch.device, integers: bytes) -> torch.Tensor:
    """Integers on the device, without waiting: torch keeps the pinned memory until the copy is done."""
    table = torch.frombuffer(bytearray(integers), dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def read_key(
    dtype: torch.dtype, count: bool, device: int, address: int, target: int, elements: int, inner: int, stride: int
) -> tuple[Any, ...]:
    """The key of a call of `kernel.read`. Calls with the same key run the same compiled kernel.

    Triton compiles a kernel for the types of the arguments (an integer has 32 or 64 bits), for whether 16 divides each
    pointer, and for the values of the constants. These follow from `dtype`, `count` and the layout.
    """
    wide = elements >= _INT32 or inner >= _INT32 or stride >= _INT32
    sizes = (elements < _INT32, inner < _INT32, stride < _INT32) if wide else None
    return dtype, count, device, address % 16 == 0, target % 16 == 0, stride == 0, sizes


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
