"""Tensors that one launch reads, as a table of integers."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...core.signal_errors import from_outside
from ..record.float_formats import CODES, LOW_PRECISION
from ..record.plain_tensor import version_of
from .device import DLPACK_TYPES
from .tensor_source import TensorSource, source_of

try:
    from ..native.core import readings as _native_readings
except ImportError:  # gpuwatch was installed without a C compiler
    _native_readings = None  # type: ignore[assignment]


class PackedRows(NamedTuple):
    """Packed rows on the device."""

    rows: torch.Tensor
    """(n, 3): low, high, meta"""
    address: int


Earlier = tuple[PackedRows, int]
"""Packed rows, and the number of a row in them."""


class KnownWeight(NamedTuple):
    """A weight that was read before: its numbers are kept, unless a row before it in its segment is non-finite."""

    tensor: weakref.ref[torch.Tensor]
    """Not kept alive. FSDP also frees the memory of weights that are alive."""
    version: int
    step: int
    row: Any
    """Its `packed` is Earlier, or None: a DeviceRow of stream_buffer.py."""


class WaitingTensors(NamedTuple):
    """Tensors whose rows lie side by side, and that wait for a launch."""

    items: list[Any]
    """Each is a TensorSource, a KnownWeight, or a tensor that lies in one piece of its storage, in order."""
    first: int
    """The position of the first row."""
    counted: bool
    """See `measure` in tensor_stats.py: `count`."""


ENTRY = struct.Struct("=8q")
"""An entry of GroupedReadings."""
_SIZE_OF_ROW = 3 * 8
_GONE = CODES[torch.float32], 0
"""As dtype and count: a weight that is gone, or was changed since, is not read. Its earlier numbers are kept."""
_TYPES = torch.Tensor, torch.nn.Parameter
_EXCHANGE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


def _reads_this_torch() -> bool:
    try:
        return _native_readings is not None and _native_readings(_EXCHANGE, _TYPES, [], 0, [], [], 1, 0) == (b"", 0)
    except (TypeError, ValueError) as error:  # this torch exports no tensors to C, or in another way
        if from_outside(error):
            raise
        return False


_is_native = _reads_this_torch()


class GroupedReadings:
    """Tensors that are read together into rows. Those with earlier numbers are the last.

    An entry is eight integers: code of the dtype (core/values.py), whether zeros and subnormals are counted, position
    of the row, address, elements, inner and stride (of its TensorSource), and the address of earlier numbers: these are
    kept, and the tensor is read only if a row before its own is non-finite. An address is 0 if there is none.
    """

    def __init__(self, waiting: list[WaitingTensors], device: torch.device) -> None:
        """`device`: that of the rows. A weight that has been moved to another one since keeps its earlier numbers."""
        self._device = device
        self.tensors: list[torch.Tensor | None] = []
        self.earlier: list[Earlier | None] = []
        self.entries = b"".join(self._entries(waiting))
        """One ENTRY after the other."""

    def _entries(self, waiting: list[WaitingTensors]) -> Iterator[bytes]:
        """Those of ordinary tensors and weights are made in C, where it was built."""
        at, place = 0, (DLPACK_TYPES.get(self._device.type, 0), self._device.index or 0)
        while at < len(waiting):
            if _is_native:
                found, at = _native_readings(_EXCHANGE, _TYPES, waiting, at, self.tensors, self.earlier, *place)
                yield found
            if at < len(waiting):
                items, first, counted = waiting[at]
                yield b"".join([self._entry(item, position, counted) for position, item in enumerate(items, first)])
                at += 1

    def _entry(self, item: TensorSource | torch.Tensor | KnownWeight, position: int, counted: bool) -> bytes:
        earlier: Earlier | None = None
        if isinstance(item, torch.Tensor):
            source = source_of(item)
            assert source is not None
        elif isinstance(item, TensorSource):
            source = item
        else:
            tensor, earlier = item[0](), item[3].packed
            assert earlier is not None
            there = tensor is not None and version_of(tensor) == item[1] and tensor.device == self._device
            source = source_of(tensor) if tensor is not None and there else None
        kept = earlier[0].address + _SIZE_OF_ROW * earlier[1] if earlier is not None else 0
        self.earlier.append(earlier)
        self.tensors.append(source.tensor if source is not None else None)
        if source is None:
            return ENTRY.pack(*_GONE, position, 0, 0, 0, 0, kept)
        tensor, elements, inner, stride = source
        counted = counted and tensor.dtype in LOW_PRECISION
        return ENTRY.pack(CODES[tensor.dtype], counted, position, tensor.data_ptr(), elements, inner, stride, kept)
