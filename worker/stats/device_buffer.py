"""TensorStats of CUDA tensors: computed on the device, kept there, and copied into the recorder without waiting.

Each tensor is read into a row on its device (device_rows.py), on the stream that is current when its hook runs. When a
segment of the recorder is full, or its page is left for another, the rows are packed into the recorder's own form, and
one asynchronous copy per run of rows brings them into the mapped file, which is registered with the driver: they arrive
with no help from Python, even while the rank is blocked in a collective. `arrived()` and `noticed()` look at what has
come, and never wait.

Every stream has rows of its own (a lane), and packs and copies them itself: no stream of the user's ever waits for
another because of us, except where a weight's row is used again on another stream than it was measured on.

To be called by one thread at a time, as the recorder is.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter, deque
from contextlib import nullcontext
from typing import Any

import torch

from ...core.recorder import layout
from ...core.recorder.layout import Field
from ...core.recorder.writer import RecorderWriter
from ...core.values import COUNTED, INF_BITS, PENDING, SHARE
from ..without_modes import without_modes
from .device_reader import Reader, Source, TorchReader, TritonReader, fresh_rows, source_of

_INFINITE = {int(encoding): bits for encoding, bits in INF_BITS.items()}
_CAPACITY = layout.VALUES_PER_SEGMENT


class Unregistered(Exception):
    """The driver does not take the recorder's memory: copies into it would block."""


class DeviceRow:
    """The numbers of a tensor that was measured before, wherever they are by now: see `DeviceStatsBuffer.again`."""

    __slots__ = ("_lane", "_packed", "_position", "numbers")

    def __init__(self, lane: _StreamBuffer, position: int) -> None:
        self._lane = lane
        self._position = position
        self._packed: torch.Tensor | None = None
        self.numbers: tuple[int, int, int] | None = None
        """low, high, meta, once they have been seen to arrive."""

    @property
    def is_packed(self) -> bool:
        """The segment in which it was measured has ended."""
        return self._packed is not None

    def on_device(self) -> torch.Tensor:
        """The row, packed or not."""
        return self._lane.rows[self._position] if self._packed is None else self._packed[self._position]

    def packed_into(self, packed: torch.Tensor) -> None:
        """The lane's rows are about to be used for other tensors."""
        self._packed = packed

    def arrive(self, numbers: tuple[int, int, int]) -> None:
        """The host knows them: nothing on the device is needed any more."""
        self.numbers = numbers
        self._packed = None

    @property
    def lane(self) -> _StreamBuffer:
        """Where it was measured."""
        return self._lane

    @property
    def position(self) -> int:
        """Its position in the segment in which it was measured."""
        return self._position


class _Copy:
    """Rows of one segment on their way."""

    __slots__ = ("event", "page", "remembered", "runs", "values_at")

    def __init__(self, page: int, values_at: int, remembered: list[DeviceRow]) -> None:
        self.page = page
        self.values_at = values_at
        self.remembered = remembered
        self.runs: list[torch.Tensor] = []
        self.event: torch.cuda.Event | None = None


class _StreamBuffer:
    """One stream's rows of the segment that is being written, and its copies."""

    __slots__ = ("device", "flying", "positions", "remembered", "rows", "stream")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.rows = fresh_rows(_CAPACITY, device)
        self.positions: list[int] = []
        self.remembered: list[DeviceRow] = []
        self.flying: deque[_Copy] = deque()


class DeviceStatsBuffer:
    """The device side of one recorder. `device` may be the CPU, for tests: then copies have arrived at once.

    `near_bits`: encoding -> sign-cleared bits from which on a value is near overflow. `underflow_share`: the share of
    subnormal elements from which on a tensor is in underflow. Pages with such rows are told by `noticed()`.
    """

    def __init__(
        self,
        recorder: RecorderWriter,
        device: torch.device,
        *,
        reader: Reader | None = None,
        near_bits: dict[int, int] | None = None,
        underflow_share: float | None = None,
    ) -> None:
        self.device = device
        self.near_bits = near_bits or {}
        self.underflow_share = underflow_share
        self.note = ""
        """Why the tensors are read by torch's operations and not by the kernel; empty if they are not."""
        self._recorder = recorder
        self._fields = recorder.fields
        self._memory = recorder.memory
        self._reader = reader or self._best_reader()
        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
            self._file = torch.frombuffer(self._memory, dtype=torch.int64)
        self._lanes: dict[tuple[int, int], _StreamBuffer] = {}
        self._last: tuple[_StreamBuffer, int] | None = None
        self._unsent: tuple[int, int] | None = None
        """A segment that ended while the user's graph was captured: (offset of its values, page)."""
        self._in_flight: Counter[int] = Counter()
        """Offset of a segment's values -> copies into it that have not been seen to arrive."""
        self._bad: set[int] = set()
        self._noticed: set[int] = set()
        self._registered: Any = None
        if device.type == "cuda":
            self._register()
        recorder.on_segment_end = self._segment_ended

    def _best_reader(self) -> Reader:
        if self.device.type != "cuda":
            return TorchReader()
        try:
            reader = TritonReader()
            if not reader.interpreted:
                return reader
            self.note = "Triton runs in its interpreter"
        except Exception as error:  # whatever a Triton that does not fit may raise
            self.note = f"{type(error).__name__}: {error}"
        return TorchReader()

    def _register(self) -> None:
        anchor = ctypes.c_char.from_buffer(self._memory)
        result = torch.cuda.cudart().cudaHostRegister(ctypes.addressof(anchor), len(self._memory), 0)  # type: ignore[no-untyped-call]  # torch has no annotation there
        if int(result) != 0:
            raise Unregistered(f"cudaHostRegister returned {int(result)}")
        self._registered = anchor  # keeps the mapping where it is

    def close(self) -> None:
        """Let go of the recorder's memory, so that it can be unmapped. Waits for the copies that are on their way."""
        self._recorder.on_segment_end = None
        for lane in self._lanes.values():
            if lane.stream is not None:
                lane.stream.synchronize()
        self._lanes.clear()
        self._in_flight.clear()
        self._last = self._unsent = None
        self._file = torch.empty(0, dtype=torch.int64, device="cpu")
        anchor, self._registered = self._registered, None
        if anchor is not None:
            torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(anchor))  # type: ignore[no-untyped-call]  # likewise

    # -- one tensor ---------------------------------------------------------------------------------------------

    def measure(self, tensor: torch.Tensor, count: bool = False) -> int | None:
        """Queue the reading of a tensor; returns its value's index in the page, None if it cannot be measured.

        With gradients off. `count` asks for the shares of zeros and subnormals, where the dtype is of low precision.
        """
        if tensor.device.type != self.device.type or self._capturing():
            return None  # while a graph is captured, it would become a part of it
        try:
            source = source_of(tensor)
        except Exception:  # a tensor class that nobody has met
            return None
        if source is None:
            return None
        lane = self._lane(source.tensor.device)
        index = self._put(lane)
        self._read(source, lane, count)
        return index

    def last(self) -> DeviceRow:
        """What was measured last, for `again`."""
        assert self._last is not None
        lane, position = self._last
        row = DeviceRow(lane, position)
        lane.remembered.append(row)
        return row

    def again(self, row: DeviceRow) -> int | None:
        """Put the numbers of a row into this page, too. None, as in `measure`, while a graph is captured."""
        if row.numbers is not None:
            low, high, meta = row.numbers
            index = self._recorder.value(low, high, meta)
            page = self._recorder.page
            assert page is not None
            self._look_at_one(page.number, low, high, meta)
            return index
        if self._capturing():
            return None
        lane = self._lane(row.lane.device)
        index = self._put(lane)
        source = row.on_device()
        here, there = lane.stream, row.lane.stream
        if here is None or there is None or lane is row.lane:
            lane.rows[lane.positions[-1], : source.numel()].copy_(source)
            return index
        here.wait_stream(there)  # the host does not wait
        source.record_stream(here)
        lane.rows[lane.positions[-1], : source.numel()].copy_(source, non_blocking=True)
        if not row.is_packed:
            there.wait_stream(here)  # or it would make the row new before it was read
        return index

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _lane(self, device: torch.device) -> _StreamBuffer:
        key = self._stream_key(device)
        lane = self._lanes.get(key)
        if lane is None:
            with torch.inference_mode(False):
                lane = self._lanes[key] = _StreamBuffer(device)
        return lane

    def _stream_key(self, device: torch.device) -> tuple[int, int]:
        """Device and current stream, as numbers."""
        return (device.index, torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else (0, 0)

    def _put(self, lane: _StreamBuffer) -> int:
        """Take the next value of the page for a row of this lane."""
        if self._unsent is not None:
            without_modes(self._send, *self._unsent)
        index = self._recorder.value(0, 0, PENDING)  # may end the segment before
        position = self._recorder.value_position
        lane.positions.append(position)
        self._last = (lane, position)
        return index

    def _read(self, source: Source, lane: _StreamBuffer, count: bool) -> None:
        position = lane.positions[-1]
        with self._on_device_of(lane):
            try:
                self._reader.read(source, lane.rows, position, count)
            except Exception as error:
                lane.positions.pop()  # nothing is there: the value stays pending
                self._fall_back(error)
                self._reader.read(source, lane.rows, position, count)
                lane.positions.append(position)

    def _fall_back(self, error: Exception) -> None:
        """No compiler, no place for Triton's cache, a device that it does not know: torch can do it, too."""
        if isinstance(self._reader, TorchReader):
            raise error
        self._reader = TorchReader()
        self.note = f"{type(error).__name__}: {error}"

    @staticmethod
    def _on_device_of(lane: _StreamBuffer) -> Any:
        if lane.stream is None or torch.cuda.current_device() == lane.device.index:
            return nullcontext()
        return torch.cuda.device(lane.device)

    @staticmethod
    def _on_stream_of(lane: _StreamBuffer) -> Any:
        return nullcontext() if lane.stream is None else torch.cuda.stream(lane.stream)

    # -- one segment --------------------------------------------------------------------------------------------

    def _segment_ended(self, values_at: int, page: int) -> None:
        if any(lane.positions for lane in self._lanes.values()):
            if self._capturing():
                # Nothing may be launched now. Nothing is measured either, so these rows can wait where they are.
                if self._unsent is None:
                    self._unsent = (values_at, page)
                    self._in_flight[values_at] += 1
            else:
                without_modes(self._send, *(self._unsent or (values_at, page)))
        self._step_over()

    def _send(self, values_at: int, page: int) -> None:
        """Start the copies of all rows that are there, into the segment whose values begin at `values_at`."""
        if self._unsent is not None:
            self._unsent = None
            self._landed_in(values_at)
        # A copy cannot be called back, so a segment is not used again before its copy has arrived; but half of them
        # always can be. The host is never so far ahead of a device that is alive.
        half = self._fields[Field.SEGMENTS] // 2
        if len(self._in_flight) >= half:
            self._collect()
        lost = len(self._in_flight) >= half
        for key, lane in list(self._lanes.items()):
            if not lane.positions:
                continue
            positions, lane.positions = lane.positions, []
            copy = _Copy(page, values_at, lane.remembered)
            lane.remembered = []
            with self._on_stream_of(lane):
                try:
                    packed = self._pack(lane, positions[-1] + 1)
                except Exception:
                    del self._lanes[key]  # its rows have not been made as new, and must not be read into
                    raise
                for row in copy.remembered:
                    row.packed_into(packed)
                if lost:
                    self._fields[Field.ROWS_LOST] += len(positions)
                    continue
                for first, end in runs(positions):
                    target = self._values(values_at, first, end)
                    target.copy_(packed[first:end], non_blocking=True)
                    copy.runs.append(target)
                if lane.stream is not None:
                    copy.event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation there
                    copy.event.record(lane.stream)
            lane.flying.append(copy)
            self._in_flight[values_at] += 1

    def _values(self, values_at: int, first: int, end: int) -> torch.Tensor:
        """Values of a segment in the file, as (n, 3)."""
        return self._file.as_strided((end - first, 3), (3, 1), values_at // 8 + first * 3)

    def _pack(self, lane: _StreamBuffer, count: int) -> torch.Tensor:
        try:
            return self._reader.pack(lane.rows, count)
        except Exception as error:
            self._fall_back(error)
            return self._reader.pack(lane.rows, count)

    def _step_over(self) -> None:
        """Have the recorder leave out the segments that copies are still on their way to."""
        if not self._in_flight:
            return
        number = self._fields[Field.SEGMENTS]
        first = layout.HEADER_BYTES + self._fields[Field.LOG_BYTES] + layout.VALUES_AT
        for step in range(number):
            values_at = first + (self._recorder._segment + 1) % number * layout.SEGMENT_BYTES
            if step == 0 and values_at in self._in_flight:
                without_modes(self._collect)
            if values_at not in self._in_flight:
                break
            self._recorder._segment += 1

    # -- what has come back -------------------------------------------------------------------------------------

    def arrived(self) -> list[int]:
        """Pages in which, since the last call, something has arrived that is non-finite. Never waits.

        The earliest page first; one that has more on its way may come again.
        """
        without_modes(self._collect)
        found = sorted(self._bad)
        self._bad.clear()
        return found

    def noticed(self) -> list[int]:
        """Pages in which, since the last call, something has arrived that is near overflow or in underflow."""
        without_modes(self._collect)
        found = sorted(self._noticed)
        self._noticed.clear()
        return found

    def _collect(self) -> None:
        if self._capturing():
            return  # asking for an event would end the user's capture
        landed: list[_Copy] = []
        for lane in self._lanes.values():
            while lane.flying:
                copy = lane.flying[0]
                if copy.event is not None and not copy.event.query():  # type: ignore[no-untyped-call]  # likewise
                    break
                lane.flying.popleft()
                self._landed_in(copy.values_at)
                landed.append(copy)
        if landed:
            self._look_at(landed)
            for copy in landed:
                for row in copy.remembered:
                    at = copy.values_at + row.position * layout.VALUE.size
                    row.arrive(layout.VALUE.unpack_from(self._memory, at))

    def _landed_in(self, values_at: int) -> None:
        self._in_flight[values_at] -= 1
        if self._in_flight[values_at] <= 0:
            del self._in_flight[values_at]

    def _look_at(self, copies: list[_Copy]) -> None:
        """One look at all of them, and a second one at each only where there is something to be seen."""
        rows = torch.cat([run for copy in copies for run in copy.runs])
        high, meta = rows[:, 1], rows[:, 2]
        bad = bool((meta & 0xFF).any())
        notable = self._is_notable(high, meta)
        if len(copies) > 1 and (bad or notable):
            for copy in copies:
                self._look_at([copy])
        elif bad or notable:
            self._bad |= {copies[0].page} if bad else set()
            self._noticed |= {copies[0].page} if notable else set()

    def _is_notable(self, high: torch.Tensor, meta: torch.Tensor) -> bool:
        """Whether one of the rows is near overflow or in underflow."""
        if self.near_bits:
            encoding = meta >> 8 & 0xFF
            for one, near in self.near_bits.items():
                largest = _INFINITE[one] - 1  # what masks are filled with
                if bool(((encoding == one) & (high >= near) & (high < largest)).any()):
                    return True
        if self.underflow_share is not None:
            # Above the share there are only the bit that says that it was counted, and nothing
            least = math.ceil(self.underflow_share * SHARE) << 32 | COUNTED
            return bool(((meta & (SHARE << 32 | COUNTED)) >= least).any())
        return False

    def _look_at_one(self, page: int, low: int, high: int, meta: int) -> None:
        """As `_look_at`, of numbers that the host knows already."""
        if meta & 0xFF:
            self._bad.add(page)
        encoding = meta >> 8 & 0xFF
        near = self.near_bits.get(encoding)
        if near is not None and near <= high < _INFINITE[encoding] - 1:
            self._noticed.add(page)
        share = self.underflow_share
        if share is not None and meta & COUNTED and (meta >> 32 & SHARE) >= share * SHARE:
            self._noticed.add(page)

    @property
    def flying(self) -> int:
        """Copies that have not been seen to arrive."""
        return sum(len(lane.flying) for lane in self._lanes.values())


def runs(positions: list[int]) -> list[tuple[int, int]]:
    """Ascending positions as half-open runs.

    >>> runs([0, 1, 2, 5, 6])
    [(0, 3), (5, 7)]
    """
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found
