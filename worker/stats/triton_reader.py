"""Reads a tensor into a row on its device with the kernels of kernel.py, at little cost for the host.

For each launch, Triton binds the arguments, derives a key from them and looks up the compiled kernel. That takes
several times as long as the driver's launch. Here the key holds only the arguments that can differ, and the compiled
kernel is launched directly.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from .device_reader import KINDS, Kind, Reading, Source
from .tensor_stats import LOW_PRECISION

_OLDEST, _NEWEST = (3, 3), (3, 7)
"""The Triton versions whose compiled kernels take all arguments, constants included, in this order.

A compiled kernel does not check the number of its arguments, so other versions are launched in the ordinary way.
"""
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
        self._programs: dict[torch.device, int] = {}
        self.interpreted: bool = kernel.INTERPRETED

    def read(self, source: Source, rows: torch.Tensor, position: int, count: bool) -> None:
        """See `Reader`. The device must be the current one."""
        tensor, elements, inner, stride = source
        kind, block, constants = _constants(tensor.dtype, count, _layout_of(source))
        programs = self._programs_for(elements, block, tensor.device)
        numbers = position, elements, inner, stride
        address, target = tensor.data_ptr(), rows.data_ptr()
        key = read_key(tensor.device, kind, address, target, *numbers, *constants)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[programs, 1, 1](address, target, *numbers, *constants)
            return
        view = tensor if kind.read_as is tensor.dtype else tensor.view(kind.read_as)
        self._keep(key, self._kernel.read[(programs,)](view, rows, *numbers, *constants))

    def read_many(self, readings: list[Reading], rows: torch.Tensor) -> None:
        """See `Reader`. One launch for all tensors of one dtype and layout, as torch's foreach operations do it.

        A table on the device says which programs read which tensor. It is copied there without waiting.
        """
        device = rows.device
        earlier = [0] * _ROWS
        groups: dict[tuple[Any, ...], _Group] = {}
        for source, position, counted, known in readings:
            if known is not None:
                earlier[position] = known[0].data_ptr() + 24 * known[1]
            if source is not None:
                tensor, elements, inner, stride = source
                kind, block, constants = _constants(tensor.dtype, counted, _layout_of(source))
                address, before = tensor.data_ptr(), position
            else:
                kind, block, constants = _constants(torch.float32, False, 0)
                elements = inner = stride = address = before = 0
            variant = kind.read_as, (address % 16 == 0, *constants, known is not None)
            group = groups.get(variant) or groups.setdefault(variant, _Group())
            programs = self._programs_for(elements, block * _BLOCKS, device)
            group.table += group.programs, programs, address, position, elements, inner, stride, before
            group.programs += programs
        table = _on(device, sum((group.table for group in groups.values()), earlier))
        at = _ROWS
        for (dtype, constants), group in groups.items():
            tensors = table[at:], table, rows
            addresses = [each.data_ptr() for each in tensors]
            numbers = len(group.table) // _ENTRY, self._kernel.element(dtype), *constants
            key = device, "many", dtype, constants, *(each % 16 == 0 for each in addresses)
            compiled = self._compiled.get(key)
            if compiled is not None:
                compiled[group.programs, 1, 1](*addresses, *numbers)
            else:
                self._keep(key, self._kernel.read_many[(group.programs,)](*tensors, *numbers))
            at += len(group.table)

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
            self._keep(key, self._kernel.pack[(programs,)](rows, packed, count, _PACK_BLOCK))
        return packed

    def _keep(self, key: tuple[Any, ...], compiled: Any) -> None:
        """Cache the compiled kernel, which an ordinary launch returns."""
        if self._is_direct and compiled is not None:
            self._compiled[key] = compiled

    def _programs_for(self, elements: int, share: int, device: torch.device) -> int:
        """One program for each `share` of the elements, but no more than keep the device's memory busy."""
        most = self._programs.get(device)
        if most is None:
            most = 3
            if device.type == "cuda":
                most = 4 * torch.cuda.get_device_properties(device).multi_processor_count
            self._programs[device] = most
        return max(1, min(-(-elements // share), most))


class _Group:
    """The tensors of one launch of `read_many`."""

    def __init__(self) -> None:
        self.programs = 0
        self.table: list[int] = []


def _layout_of(source: Source) -> int:
    """The kernels' LAYOUT."""
    return 0 if source.stride == 0 else 1 if source.elements < _INT32 else 2


@functools.cache
def _constants(dtype: torch.dtype, count: bool, layout: int) -> tuple[Kind, int, tuple[Any, ...]]:
    """(how a dtype is read, elements in a block, the kernels' constants KIND, COUNT, LAYOUT, DEEP and WIDE)"""
    kind = KINDS[dtype]
    deep = kind.deep if layout == 0 else 1
    return kind, deep * kind.wide, (kind.code, count and dtype in LOW_PRECISION, layout, deep, kind.wide)


def _on(device: torch.device, numbers: list[int]) -> torch.Tensor:
    """Integers on the device, without waiting: torch keeps the pinned memory until the copy is done."""
    table = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def read_key(
    device: torch.device,
    kind: Kind,
    address: int,
    target: int,
    position: int,
    elements: int,
    inner: int,
    stride: int,
    *constants: Any,
) -> tuple[Any, ...]:
    """The key of a call of `kernel.read`. Calls with the same key run the same compiled kernel.

    Triton compiles a kernel for the types of the arguments (an integer has 32 or 64 bits), for whether 16 divides each
    pointer, and for the values of the constants.
    """
    wide = position >= _INT32 or elements >= _INT32 or inner >= _INT32 or stride >= _INT32
    sizes = (elements < _INT32, inner < _INT32, stride < _INT32) if wide else None
    return device, kind.read_as, address % 16 == 0, target % 16 == 0, sizes, constants


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
