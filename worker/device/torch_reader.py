"""Reads a tensor into a row on its device, without waiting. Here by torch's operations; triton_reader.py uses a kernel.

A row is six integers: low, high, meta (see core/values.py), then zeros, subnormals, and the number of elements among
which those were counted. `pack` converts rows into the recorder's three integers and resets them. Both readers give the
same bits as `measure` does on the host, with one exception: every nan of a float8 dtype becomes the same nan.
"""
# ruff: noqa: D102  # `TensorReader` says what the methods of a reader do

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from ...core.signal_errors import from_outside
from ...core.values import COUNTED, INF_BITS, MIN_NORMAL_BITS, SHARE, NonFinite, ValueEncoding
from ..record.tensor_stats import (
    CODES,
    FLOATS,
    LOW_PRECISION,
    has_memory,
    is_unfinished,
    sole_inner,
    to_plain,
    unwrapped,
    version_of,
)
from .device import DLPACK_TYPES, without_modes

try:
    from ..native.core import readings as _native_readings
except ImportError:  # gpuwatch was installed without a C compiler
    _native_readings = None  # type: ignore[assignment]

COLUMNS = 6
LARGEST = (1 << 63) - 1
_NON_FINITE = int(NonFinite.NAN | NonFinite.POSINF | NonFinite.NEGINF)
_CHUNK = 1 << 22
"""Elements that torch's operations read at once, so that no temporary is as large as a tensor."""


class KernelDtype(NamedTuple):
    """How the kernel reads a dtype: its number in kernel_elements.py, the dtype it loads, and the shape of a block."""

    code: int
    read_as: torch.dtype
    deep: int
    wide: int


def _kinds() -> dict[torch.dtype, KernelDtype]:
    kinds = {
        torch.float64: KernelDtype(1, torch.float64, 4, 256),
        torch.float32: KernelDtype(2, torch.float32, 4, 512),
        torch.float16: KernelDtype(3, torch.float16, 4, 1024),
        torch.bfloat16: KernelDtype(4, torch.bfloat16, 4, 1024),
        torch.bool: KernelDtype(0, torch.uint8, 2, 1024),
    }
    for name in ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"):
        dtype = getattr(torch, name)
        kinds[dtype] = KernelDtype(0, dtype, 2, 512)
    kinds[torch.uint64] = KernelDtype(5, torch.int64, 2, 512)
    for code, name in enumerate(("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu"), start=6):
        float8 = getattr(torch, f"float8_{name}", None)  # torch 2.5 lacks some of them
        if isinstance(float8, torch.dtype):
            kinds[float8] = KernelDtype(code, torch.int8, 4, 1024)
    return kinds


KINDS = _kinds()
DTYPES = {CODES[dtype]: dtype for dtype in KINDS}
"""Code of a dtype (core/values.py) -> the dtype, for those that a reader knows."""
_TENSOR, _PARAMETER, _STRIDED = torch.Tensor, torch.nn.Parameter, torch.strided


class TensorSource(NamedTuple):
    """Where the numbers of a tensor are: `elements` in runs of `inner`, which begin `stride` apart.

    >>> source_of(torch.zeros(3, 10)[:, :4])[1:]
    (12, 4, 10)
    """

    tensor: torch.Tensor
    elements: int
    inner: int
    stride: int


def dense(tensor: torch.Tensor, elements: int) -> TensorSource:
    """The source of a tensor that lies in one piece, in order."""
    return _new_source(TensorSource, (tensor, elements, elements, 0))


_new_source: Callable[[type[TensorSource], tuple[torch.Tensor, int, int, int]], TensorSource] = tuple.__new__
"""Makes a named tuple three times as fast as its class does."""


def source_of(tensor: torch.Tensor) -> TensorSource | None:
    """The memory to read for a tensor. None if there is none, or if it cannot be read without waiting."""
    plain = _plain(tensor)
    if plain is None or plain.dtype not in KINDS:
        return None
    count = plain.numel()
    if plain.is_contiguous():  # the fast path: nearly all are
        end = (plain.storage_offset() + count) * plain.itemsize
        if not count or not plain.data_ptr() or plain.untyped_storage().nbytes() < end:
            return None
        return dense(plain, count)
    if not count or not has_memory(plain):
        return None  # a kernel must not read freed memory
    source = _runs(plain)
    if source is None:  # holes of more than one size
        plain = plain.contiguous()
        source = TensorSource(plain, plain.numel(), plain.numel(), 0)
    return source


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """As `to_plain`, but without waiting, and without a conversion if the reader knows the dtype."""
    tensor = unwrapped(tensor)
    cls = type(tensor)
    plain = (cls is _TENSOR or cls is _PARAMETER) and tensor.layout is _STRIDED and not tensor.is_nested
    if plain and tensor.dtype in KINDS:
        return tensor.resolve_neg() if tensor.is_neg() else tensor
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        return _plain(local)
    if cls.__name__ == "AsyncCollectiveTensor":
        # a wait of ours would make the script's stream wait: see `is_unfinished`
        return _plain(tensor.trigger_wait()) if not is_unfinished(tensor) else None  # type: ignore[attr-defined]
    if tensor.layout is torch.jagged:
        # unbind() would wait for the offsets. Parts with explicit lengths have holes between them.
        values: torch.Tensor | None = getattr(tensor, "_values", None)
        return _plain(values) if values is not None and getattr(tensor, "_lengths", None) is None else None
    inner = sole_inner(tensor)
    return _plain(inner) if inner is not None else to_plain(tensor)


def _runs(tensor: torch.Tensor) -> TensorSource | None:
    """The memory of a strided tensor with holes as runs of equal length. None if one stride cannot describe it."""
    # an expanded dimension repeats the same elements, so it is dropped
    dims = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and step)
    inner, outer, stride = 1, 1, 0
    for step, size in dims:
        if outer == 1 and step == inner:
            inner *= size
        elif outer == 1 or step == stride * outer:
            stride = stride or step
            outer *= size
        else:
            return None
    return TensorSource(tensor, inner * outer, inner, stride)


# A compiled graph reads its tensors on a device itself, and leaves numbers that a reader reads in place of a tensor.

GRAPH_NUMBERS = 3
"""How many. As elements, they have the extremes and the non-finite values of the tensor."""
FROM_GRAPH = -1
"""The stride of their source, by which a reader can tell them from a tensor of float64."""
_stack, _FLOAT64 = torch.stack, torch.float64  # read from `torch` itself, they would add a guard (see `traced_class`)


def graph_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, in float64. Dynamo traces this function."""
    return _stack((tensor.amin(), tensor.amax(), tensor.abs().amin())).to(_FLOAT64)


def graph_source(numbers: torch.Tensor) -> TensorSource:
    """These numbers as the elements to read."""
    return TensorSource(numbers, GRAPH_NUMBERS, GRAPH_NUMBERS, FROM_GRAPH)


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
_TYPES = _TENSOR, _PARAMETER
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


class TensorReader(Protocol):
    """Reads tensors into rows on one stream. `read` may be called with modes of the script, and with gradients on."""

    def read(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> None:
        """Write the numbers of a tensor into a fresh row."""

    def read_dense(
        self, tensors: list[torch.Tensor], elements: list[int], rows: torch.Tensor, position: int, count: bool
    ) -> None:
        """Read tensors that lie in one piece, in order, into rows side by side."""

    def read_known(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> bool:
        """`read` with one launch of a kernel that has run before, as a capture allows; False if there is none."""

    def read_many(self, readings: GroupedReadings, rows: torch.Tensor) -> None:
        """Write the rows that the tensors would get one after the other."""

    def pack(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """The first `count` rows as (count, 3) for the recorder. Resets them to fresh rows."""


def fresh_rows(count: int, device: torch.device) -> torch.Tensor:
    """Rows into which nothing has been read."""
    rows = torch.zeros(count, COLUMNS, dtype=torch.int64, device=device)
    rows[:, 0].fill_(LARGEST)
    return rows


class TorchReader:
    """A `TensorReader` of torch's operations, several for one tensor: for the CPU, and where Triton does not run."""

    def read(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> None:
        without_modes(self._read, source, rows, position, count)

    def _read(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> None:
        rows[position].copy_(self.row(source, count))

    def read_dense(
        self, tensors: list[torch.Tensor], elements: list[int], rows: torch.Tensor, position: int, count: bool
    ) -> None:
        for at, source in enumerate(map(dense, tensors, elements), position):
            self.read(source, rows, at, count)

    def read_known(self, source: TensorSource, rows: torch.Tensor, position: int, count: bool) -> bool:
        """These are many launches, and take memory."""
        return False

    def read_many(self, readings: GroupedReadings, rows: torch.Tensor) -> None:
        """The host does not know whether earlier numbers are good, so every tensor is read."""
        entries = ENTRY.iter_unpack(readings.entries)
        for entry, tensor, earlier in zip(entries, readings.tensors, readings.earlier, strict=True):
            _, counted, position, _, elements, inner, stride, _ = entry
            found = self.row(TensorSource(tensor, elements, inner, stride), counted) if tensor is not None else None
            if earlier is not None:
                kept = torch.nn.functional.pad(earlier[0].rows[earlier[1]], (0, COLUMNS - 3))
                bad = (rows[:position, 2] & _NON_FINITE).any()
                found = torch.where(bad, found, kept) if found is not None else kept
            assert found is not None
            rows[position].copy_(found)

    @staticmethod
    def row(source: TensorSource, count: bool) -> torch.Tensor:
        """(COLUMNS,) of int64: what `read` leaves in a fresh row."""
        flat = _flat(source)
        counted = count and flat.dtype in LOW_PRECISION
        parts = [_numbers(flat[at : at + _CHUNK], counted) for at in range(0, source.elements, _CHUNK)]
        found = torch.stack(parts)
        row = torch.cat((found[:, :1].amin(0), found[:, 1:2].amax(0), found[:, 2:5].amax(0), found[:, 5:].sum(0)))
        low, high, nan, posinf, neginf, zeros, small = row.unbind()
        meta = nan * int(NonFinite.NAN) + posinf * int(NonFinite.POSINF) + neginf * int(NonFinite.NEGINF)
        meta = meta + (_encoding(flat.dtype) << 8)
        total = torch.full_like(zeros, source.elements if counted else 0)
        return torch.stack((low, high, meta, zeros, small, total))

    def pack(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        low, high, meta, zeros, subnormals, total = rows[:count].unbind(1)
        divisor = total.clamp(min=1)
        shares = _share(zeros, divisor) << 16 | _share(subnormals, divisor) << 32 | COUNTED
        packed = torch.stack((low, high, torch.where(total > 0, meta | shares, meta)), 1)
        rows[:count, 0].fill_(LARGEST)
        rows[:count, 1:].zero_()
        return packed


def _flat(source: TensorSource) -> torch.Tensor:
    tensor, elements, inner, stride = source
    if stride == 0 or stride == FROM_GRAPH:
        return tensor.as_strided((elements,), (1,))
    return tensor.as_strided((elements // inner, inner), (stride, 1)).reshape(-1)


def _encoding(dtype: torch.dtype) -> int:
    if not dtype.is_floating_point:
        return int(ValueEncoding.INTEGER)
    return FLOATS[dtype].meta >> 8 if dtype in FLOATS else int(ValueEncoding.FLOAT32)


def _numbers(part: torch.Tensor, count: bool) -> torch.Tensor:
    """(low, high, any nan, any +inf, any -inf, zeros, subnormals) of a flat piece of a tensor."""
    nothing = torch.zeros((), dtype=torch.int64, device=part.device)
    if not part.dtype.is_floating_point:
        numbers = part.view(torch.int64) if part.dtype is torch.uint64 else part.to(torch.int64)
        if part.dtype is torch.uint64:
            sizes = torch.where(numbers < 0, LARGEST, numbers)
        else:
            sizes = numbers.abs()
            sizes = torch.where(sizes < 0, LARGEST, sizes)  # abs() of the smallest int64 overflows
        return torch.stack((*torch.aminmax(sizes), *[nothing] * 5))
    normal = 0
    if part.dtype in FLOATS:
        float_ = FLOATS[part.dtype]
        normal = MIN_NORMAL_BITS[ValueEncoding(float_.meta >> 8)]
    else:
        float_ = FLOATS[torch.float32]
        if count:
            (normal,) = struct.unpack("<i", struct.pack("<f", torch.finfo(part.dtype).smallest_normal))
        part = part.to(torch.float32)
        part = torch.where(part.isnan(), torch.nan, part)  # always the same nan
    bits = part.view(float_.bits)
    sizes = bits.bitwise_and(float_.mask)
    inf = INF_BITS[ValueEncoding(float_.meta >> 8)]
    negative_inf = inf - float_.mask - 1
    zeros = (sizes == 0).sum() if count else nothing
    small = (sizes < normal).sum() - zeros if count else nothing
    found = (*torch.aminmax(sizes), (sizes > inf).any(), (bits == inf).any(), (bits == negative_inf).any())
    return torch.stack([number.to(torch.int64) for number in (*found, zeros, small)])


def _share(number: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """`number` of `total` as an integer of 16 bits. It is 0 only if `number` is 0."""
    share = torch.round(number.double() / total.double() * SHARE).to(torch.int64)
    return torch.maximum(share, number.clamp(max=1))
