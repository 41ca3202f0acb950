"""Reads a tensor into a row on its device, without waiting. Here by torch's operations; triton_reader.py uses a kernel.

A row is six integers: low, high, meta (see core/values.py), then zeros, subnormals, and the number of elements among
which those were counted. `pack` converts rows into the recorder's three integers and resets them. Both readers give the
same bits as `measure` does on the host, with one exception: every nan of a float8 dtype becomes the same nan.
"""
# ruff: noqa: D102  # `TensorReader` says what the methods of a reader do

from __future__ import annotations

import struct
from typing import Protocol

import torch

from ...core.values import COUNTED, INF_BITS, MIN_NORMAL_BITS, SHARE, NonFinite, ValueEncoding
from ..record.float_formats import FLOATS, LOW_PRECISION
from .device import without_modes
from .grouped_readings import ENTRY, GroupedReadings
from .tensor_source import TensorSource, dense

COLUMNS = 6
LARGEST = (1 << 63) - 1
_NON_FINITE = int(NonFinite.NAN | NonFinite.POSINF | NonFinite.NEGINF)
_CHUNK = 1 << 22
"""Elements that torch's operations read at once, so that no temporary is as large as a tensor."""


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
