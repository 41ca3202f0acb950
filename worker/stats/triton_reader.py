"""Reads a tensor into a row on its device with the kernels of kernel.py, at little cost for the host.

For each launch, Triton binds the arguments, derives a key from them and looks up the compiled kernel. That takes
several times as long as the driver's launch. Here the key holds only the arguments that can differ, and the compiled
kernel is launched directly.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from .device_reader import KINDS, Earlier, Kind, Source
from .tensor_stats import LOW_PRECISION

_OLDEST, _NEWEST = (3, 3), (3, 7)
"""The Triton versions whose compiled kernels take all arguments, constants included, in this order.

A compiled kernel does not check the number of its arguments, so other versions are launched in the ordinary way.
"""
_INT32 = 1 << 31
_PACK_BLOCK = 128


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

    def read(
        self, source: Source, rows: torch.Tensor, position: int, count: bool, earlier: Earlier | None = None
    ) -> None:
        """See `Reader`. The device must be the current one."""
        tensor, elements, inner, stride = source
        dtype = tensor.dtype
        kind = KINDS[dtype]
        if stride == 0:
            layout, deep = 0, kind.deep
        else:
            layout, deep = (1 if elements < _INT32 else 2), 1
        programs = min(-(-elements // (deep * kind.wide)), self._most(tensor.device))
        numbers = (
            position,
            elements,
            inner,
            stride,
            kind.code,
            count and dtype in LOW_PRECISION,
            layout,
            deep,
            kind.wide,
            earlier is not None,
        )
        address, target = tensor.data_ptr(), rows.data_ptr()
        known = target if earlier is None else earlier[0].data_ptr() + 24 * earlier[1]
        key = read_key(tensor.device, kind, address, target, known, *numbers)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[programs, 1, 1](address, target, known, *numbers)
            return
        view = tensor if kind.read_as is dtype else tensor.view(kind.read_as)
        before = rows if earlier is None else earlier[0][earlier[1]]
        self._keep(key, self._kernel.read[(programs,)](view, rows, before, *numbers))

    def pack(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """See `Reader`."""
        packed = torch.empty(count, 3, dtype=torch.int64, device=rows.device)
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

    def _most(self, device: torch.device) -> int:
        """The number of programs that keep the device's memory busy. Each reads several blocks, one after the other."""
        most = self._programs.get(device)
        if most is None:
            most = 3
            if device.type == "cuda":
                most = 4 * torch.cuda.get_device_properties(device).multi_processor_count
            self._programs[device] = most
        return most


def read_key(
    device: torch.device,
    kind: Kind,
    address: int,
    target: int,
    earlier: int,
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
    return device, kind.read_as, address % 16 == 0, target % 16 == 0, earlier % 16 == 0, sizes, constants


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
