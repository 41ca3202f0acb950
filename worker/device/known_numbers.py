"""Tensors of known numbers, and the rows that a reader must make of them: see reader_check.py.

Each lies among numbers that are not finite, and has extremes of its own at its ends: a wrong stride, a wrong length, a
missing tail, a wrong dtype and exchanged rows all show.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...core.values import NonFinite
from ..record.plain_tensor import version_of
from .device import without_modes
from .grouped_readings import Earlier, GroupedReadings, KnownWeight, PackedRows, WaitingTensors
from .tensor_source import KINDS, TensorSource, dense
from .torch_reader import TorchReader, fresh_rows

FIRST_ROW = 1
"""Position of the first tensor's row. The rows around those of the tensors must stay as they are."""
_INNER, _STRIDE = 5, 11
"""Of tensors with holes, in elements."""
_ALIGNED = 16
_OTHERS = 37, 1, 5, 9, 23
"""Elements of the shorter ones. With the longest one they are an even number, for a kernel reads two."""


class KnownNumbers(NamedTuple):
    """Tensors of one dtype and layout in one memory."""

    memory: torch.Tensor
    """(n,) of uint8"""
    places: tuple[tuple[int, int, int, int], ...]
    """(first byte, elements, inner, stride) of each"""
    rows: torch.Tensor
    """(n, COLUMNS) of int64: what a reader leaves in the fresh row of each"""
    dtype: torch.dtype
    counted: bool
    """Zeros and subnormals are."""

    def on(self, device: torch.device) -> list[TensorSource]:
        """A copy of them on a device, put on the current stream. The host does not wait."""
        return list(_sources(upload(self.memory, device), self.places, self.dtype))


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting: torch keeps the pinned memory until it is done."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, copy=True)


@functools.lru_cache(8)
def known_numbers(dtype: torch.dtype, count: bool, with_holes: bool, is_aligned: bool, blocks: int = 1) -> KnownNumbers:
    """`count`: zeros and subnormals are counted. `is_aligned`: 16 divides the address of each. `blocks`: so many blocks
    of a kernel and one that is not whole are in the longest one."""
    return without_modes(_known_numbers, dtype, count, with_holes, is_aligned, blocks)


def _known_numbers(dtype: torch.dtype, count: bool, with_holes: bool, is_aligned: bool, blocks: int) -> KnownNumbers:
    with torch.inference_mode(False):
        longest = blocks * KINDS[dtype].deep * KINDS[dtype].wide + 37
        parts, places, at = [_filler(_ALIGNED, dtype)], [], _ALIGNED
        for number, elements in enumerate((longest, *_OTHERS)):
            before = 0 if is_aligned else dtype.itemsize
            if with_holes:
                elements = -(-elements // _INNER) * _INNER
            numbers = _elements(number, elements, dtype)
            inner, stride = (_INNER, _STRIDE) if with_holes else (elements, 0)
            if with_holes:
                runs = _filler(elements // _INNER * _STRIDE * dtype.itemsize, dtype).view(-1, _STRIDE * dtype.itemsize)
                runs[:, : _INNER * dtype.itemsize] = numbers.view(-1, _INNER * dtype.itemsize)
                numbers = runs.flatten()
            places.append((at + before, elements, inner, stride))
            end = at + before + len(numbers) + _ALIGNED
            end += -end % _ALIGNED
            parts += [_filler(before, dtype), numbers, _filler(end - at - before - len(numbers), dtype)]
            at = end
        memory = torch.cat(parts)
        sources = _sources(memory, tuple(places), dtype)
        rows = torch.stack([TorchReader.row(source, count) for source in sources])
        return KnownNumbers(memory, tuple(places), rows, dtype, count)


def _sources(
    memory: torch.Tensor, places: tuple[tuple[int, int, int, int], ...], dtype: torch.dtype
) -> Iterator[TensorSource]:
    for first, elements, inner, stride in places:
        extent = elements if not stride else (elements // inner - 1) * stride + inner
        flat = memory[first : first + extent * dtype.itemsize].view(dtype)
        yield (
            TensorSource(flat.as_strided((elements // inner, inner), (stride, 1)), elements, inner, stride)
            if stride
            else dense(flat, elements)
        )


def _filler(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes that are nan, or larger than any known integer."""
    if dtype is torch.bool:
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
    if not dtype.is_floating_point:
        return torch.full((size,), 0x7F, dtype=torch.uint8, device="cpu")
    nan = torch.full((size // dtype.itemsize,), torch.nan, device="cpu").to(dtype).view(torch.uint8)
    return torch.cat((nan, torch.zeros(size - len(nan), dtype=torch.uint8, device="cpu")))


def _elements(number: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of the tensor of this number."""
    index = torch.arange(elements, device="cpu")
    if dtype is torch.bool:
        found = index == elements - 1 if number % 2 else torch.zeros_like(index)
        return found.to(torch.uint8)
    if not dtype.is_floating_point:
        found = index * 37 % 11 + 2
        found[-1] = 20 + number
        found[0] = 1 if elements > 1 else 30
        return found.view(torch.uint8).view(-1, found.itemsize)[:, : dtype.itemsize].reshape(-1)  # little-endian
    found = 1 + (index * 37 % 101).double() / 128
    if number == 1:  # zeros and subnormals
        least = torch.finfo(dtype).smallest_normal
        found = torch.where(index % 3 == 0, 0.0, torch.where(index % 3 == 1, least / 2, found))
    found = torch.where(index % 2 == 1, -found, found)
    found[-1] = 4.0 * 2**number
    if elements > 1:
        found[0] = 0.5
    if number == 2:
        found[0] = torch.inf
    if number == 3:
        found[-1], found[elements // 2] = -torch.inf, torch.nan
    return found.to(torch.float32 if dtype.itemsize == 1 else dtype).to(dtype).view(torch.uint8)


Read = Callable[[list[TensorSource], torch.Tensor], None]
"""read(sources, rows) reads tensors into fresh rows side by side, from FIRST_ROW on."""
FoundExpected = tuple[torch.Tensor, torch.Tensor]
"""(on the device, on the host): all memory that a kernel wrote to, and what must be there."""


def rows_read(device: torch.device, known: KnownNumbers, read: Read, is_aligned: bool = True) -> FoundExpected:
    """Have a kernel read the tensors into rows, and a second time in another order into other rows.

    `is_aligned`: 16 divides the address of the rows.
    """
    tables = [_fresh_table(known) for _ in range(2)]
    for number, table in enumerate(tables):
        table[FIRST_ROW : FIRST_ROW + len(known.rows)] = known.rows.flip(0) if number else known.rows
    expected = torch.stack(tables)
    memory, found = _on_device(torch.stack([_fresh_table(known) for _ in tables]), device, is_aligned)
    sources = known.on(device)
    read(sources, found[0])
    read(sources[::-1], found[1])
    return memory, expected.flatten()


class _KnownRow(NamedTuple):
    """As DeviceRow of stream_buffer.py has it."""

    packed: Earlier


def rows_kept(
    device: torch.device, known: KnownNumbers, read: Callable[[GroupedReadings, torch.Tensor], None]
) -> FoundExpected:
    """Have a kernel keep the earlier numbers of the tensors, then read them, for a row before them is not finite."""
    earlier = torch.arange(3 * len(known.rows), device="cpu").view(-1, 3) + 11
    earlier[:, 2] = 2 << 8
    start = torch.stack([_fresh_table(known) for _ in range(2)])
    start[1, 0, 2] = int(NonFinite.NAN)
    expected, here = start.clone(), slice(FIRST_ROW, FIRST_ROW + len(known.rows))
    expected[0, here, :3], expected[1, here] = earlier, known.rows
    memory, found = _on_device(start, device, True)
    numbers = upload(earlier, device)
    packed, sources = PackedRows(numbers, numbers.data_ptr()), known.on(device)
    tensors = [source.tensor for source in sources]
    items = [
        KnownWeight(weakref.ref(tensor), version_of(tensor), 0, _KnownRow((packed, number)))
        for number, tensor in enumerate(tensors)
    ]
    for rows in found:
        read(GroupedReadings([WaitingTensors(list(items), FIRST_ROW, known.counted)], device), rows)
    return memory, expected.flatten()


def rows_packed(
    device: torch.device, pack: Callable[[torch.Tensor, int], torch.Tensor], is_aligned: bool = True
) -> FoundExpected:
    """Have a kernel pack and reset rows, twice."""
    expected, found = [], []
    for number in range(2):
        rows = _rows_to_pack(number)
        memory, (table,) = _on_device(rows[None], device, is_aligned)
        found += [pack(table, len(rows)).flatten(), memory]
        expected += [TorchReader().pack(rows, len(rows)).flatten(), rows.flatten()]
    return torch.cat(found), torch.cat(expected)


def _fresh_table(known: KnownNumbers) -> torch.Tensor:
    return fresh_rows(FIRST_ROW + len(known.rows) + 2, torch.device("cpu"))


def _on_device(tables: torch.Tensor, device: torch.device, is_aligned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(their words in one piece, the same as tables)"""
    words = upload(torch.cat((torch.zeros(1, dtype=torch.int64, device="cpu"), tables.flatten())), device)
    memory = words[1:] if not is_aligned else words[1:].clone()
    return memory, memory.view(tables.shape)


def _rows_to_pack(number: int) -> torch.Tensor:
    """(n, COLUMNS) of int64, more than one program packs; another `number`, other rows."""
    index = torch.arange(131, device="cpu")
    total = (index % 4) * (3000 + 700 * number)
    low, high, meta = index + 5 + 1000 * number, index * index + 77 * number, index % 8 | 3 << 8
    rows = torch.stack((low, high, meta, total * (index % 5) // 5, total * (index % 3) // 11, total), 1)
    rows[7] = fresh_rows(1, torch.device("cpu"))[0]
    return rows
