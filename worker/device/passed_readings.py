"""Numbers of tensors on a device that belong to no frame, such as those that pass between ranks.

A tensor is read at once, on the current stream: this keeps the order with a collective that is issued next from that
stream, or one that it has waited for. The numbers are copied later, many in one copy, and `collect()` never waits.

Like the buffer beside it (device_buffer.py), it must be called by one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.signal_errors import from_outside
from ...core.values import PENDING
from .device import StatsDevice, StreamKey, has_ended, without_modes
from .grouped_readings import GroupedReadings, WaitingTensors
from .tensor_source import TensorSource, source_of
from .torch_reader import fresh_rows

_CAPACITY = 256
"""Rows of a stream between two copies: as many as one launch may read (kernel.py)."""
_MOST_FLYING = 64
"""Copies of a stream that are outstanding. If the device works, the host is never this far ahead of it."""
_NOT_FINITE = 0xFF


@dataclass(slots=True, eq=False)
class PassedReading:
    """The numbers of tensors that were read together. `about` is the caller's."""

    about: Any
    tensors: int = 0
    """How many they are."""
    parts: dict[int, Any] = field(default_factory=dict)
    """Number of its first tensor -> array (n, 3) of low, high, meta."""
    is_lost: bool = False
    """The numbers will not arrive."""

    @property
    def missing(self) -> int:
        """How many tensors' numbers are outstanding."""
        return self.tensors - sum(map(len, self.parts.values()))

    @property
    def numbers(self) -> list[tuple[int, int, int]] | None:
        """(low, high, meta) of each tensor; None if they have not arrived."""
        if self.missing or self.is_lost:
            return None
        parts = (self.parts[at] for at in sorted(self.parts))
        return [(int(low), int(high), int(meta)) for part in parts for low, high, meta in part]

    @property
    def is_bad(self) -> bool:
        """All numbers have arrived, and some are not finite."""
        parts = self.parts.values()
        return not (self.missing or self.is_lost) and any(bool((part[:, 2] & _NOT_FINITE).any()) for part in parts)


ReadRows = list[tuple[PassedReading, int, int, int]]
"""(reading, number of the first of its tensors that are meant, their first row, their end)"""


@dataclass(eq=False)
class _StreamRows:
    """One stream's rows, and its outstanding copies."""

    stream: Any
    rows: torch.Tensor | None = None
    used: int = 0
    read: ReadRows = field(default_factory=list)
    """Their copy was not started yet."""
    flying: deque[tuple[Any, torch.Tensor, torch.Tensor, ReadRows]] = field(default_factory=deque)
    """(event, packed rows, the same in host memory, the readings in them)"""


class PassedReadings:
    """All streams' readings that belong to no frame."""

    def __init__(self, driver: StatsDevice, do: Callable[..., Any]) -> None:
        """`do(method, ...)` has a Reader (torch_reader.py) do something."""
        self._driver = driver
        self._do = do
        self._streams: dict[StreamKey, _StreamRows] = {}
        self.unseen = False
        """A tensor was not read, or its numbers are lost."""
        self.arrived: list[PassedReading] = []
        """Readings whose numbers have arrived and are not all finite. Who has dealt with one removes it."""

    def read(self, tensors: Sequence[torch.Tensor], about: Any) -> tuple[PassedReading, list[torch.Tensor]] | None:
        """Start to read. Returns the reading and the tensors that it is of; None if there is nothing to read, or a
        graph is captured."""
        return without_modes(self._read, tensors, about)

    def _read(self, tensors: Sequence[torch.Tensor], about: Any) -> tuple[PassedReading, list[torch.Tensor]] | None:
        if self._driver.is_capturing():
            self.unseen = True
            return None
        found = [(each, source) for each in tensors if (source := self._source(each, tensors[0].device)) is not None]
        if not found:
            return None
        reading = PassedReading(about, is_lost=True)  # until all were read: a signal's handler may raise in between
        device = found[0][0].device
        try:
            for first in range(0, len(found), _CAPACITY):
                self._launch([source for _, source in found[first : first + _CAPACITY]], reading, device)
            reading.is_lost = False
        finally:
            self.unseen |= reading.is_lost
        return reading, [tensor for tensor, _ in found]

    def _source(self, tensor: torch.Tensor, device: torch.device) -> TensorSource | None:
        if not tensor.dtype.is_floating_point or not tensor.numel():
            return None
        source = source_of(tensor) if tensor.device == device and self._driver.holds(tensor) else None
        self.unseen |= source is None
        return source

    def _launch(self, sources: list[TensorSource], reading: PassedReading, device: torch.device) -> None:
        key = self._driver.stream_key(device)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _StreamRows(self._driver.stream(device))
        with self._driver.use(key, stream.stream):
            if stream.used + len(sources) > _CAPACITY:
                self._send(stream)
            if stream.rows is None:
                with torch.inference_mode(False):
                    stream.rows = self._driver.rows(fresh_rows(_CAPACITY, device))
            first, stream.used = stream.used, stream.used + len(sources)
            stream.read.append((reading, reading.tensors, first, stream.used))
            reading.tensors += len(sources)
            if len(sources) == 1:
                self._do("read", sources[0], stream.rows, first, False)
            else:
                self._do("read_many", GroupedReadings([WaitingTensors(sources, first, False)], device), stream.rows)
            self._driver.keep((source.tensor for source in sources), key, stream.stream)

    def flush(self) -> None:
        """Start the copies of all that was read. Does nothing while the user captures a graph."""
        without_modes(self._flush)

    def _flush(self) -> None:
        for key, stream in self._streams.items():
            if stream.read:
                with self._driver.use(key, stream.stream):
                    if not self._driver.is_capturing():
                        self._send(stream)

    def _send(self, stream: _StreamRows) -> None:
        rows, stream.rows = stream.rows, None  # after an error they are not reset, and must not be read into
        read, stream.read = stream.read, []
        count, stream.used = stream.used, 0
        is_sent = False
        try:
            if len(stream.flying) >= _MOST_FLYING:
                raise RuntimeError("the device does not deliver its numbers")
            assert rows is not None
            packed = self._do("pack", rows[:count], count)
            staging = self._driver.staging(*packed.shape, dtype=packed.dtype)
            self._driver.copy(packed, staging)
            stream.flying.append((self._driver.record(stream.stream), packed, staging, read))
            is_sent = True
            stream.rows = rows  # `pack` has reset them
        except Exception as error:
            if from_outside(error) or len(stream.flying) < _MOST_FLYING:
                raise
        finally:
            if not is_sent:
                self._lose(read)

    def collect(self) -> list[PassedReading]:
        """`arrived`, in the order of reading, with those whose numbers have come since the last call."""
        without_modes(self._collect)
        return self.arrived

    def _collect(self) -> None:
        """A copy leaves `flying` once all is done for it: what a signal's handler has interrupted is done again."""
        if self._driver.is_capturing():  # a query would break the user's capture
            return
        for key, stream in self._streams.items():
            if not stream.flying:
                continue
            with self._driver.use(key, stream.stream):
                try:
                    for copy in tuple(stream.flying):
                        event, _, staging, read = copy
                        if not self._driver.query(event):
                            break
                        self._note_arrived(staging.numpy(), read)
                        if stream.flying and stream.flying[0] is copy:
                            stream.flying.popleft()
                except Exception as error:  # the device has failed: the user's next call will raise the same error
                    if from_outside(error):
                        raise
                    for *_, read in stream.flying:
                        self._lose(read)
                    stream.flying.clear()

    def _note_arrived(self, numbers: Any, read: ReadRows) -> None:
        if (numbers[:, 2] == PENDING).any():  # the device has found a kernel wrong: see reader_check.py
            self._lose(read)
            return
        for reading, at, first, end in read:
            reading.parts[at] = numbers[first:end]
        if not (numbers[:, 2] & _NOT_FINITE).any() and all(len(reading.parts) == 1 for reading, *_ in read):
            return
        for reading, *_ in read:
            if reading.is_bad and reading not in self.arrived:
                self.arrived.append(reading)

    def drop(self) -> None:
        """Lose what was read and not sent."""
        for stream in self._streams.values():
            read, stream.read = stream.read, []
            stream.rows, stream.used = None, 0
            self._lose(read)

    def _lose(self, read: ReadRows) -> None:
        self.unseen = True
        for reading, *_ in read:
            reading.is_lost = True

    @property
    def outstanding(self) -> bool:
        """Whether numbers are outstanding."""
        return any(stream.read or stream.flying for stream in self._streams.values())

    def close(self) -> bool:
        """Wait for the outstanding copies, but not for ever. Returns whether all have arrived."""
        for key, stream in list(self._streams.items()):
            try:
                if has_ended(self._driver, key, stream.stream):
                    del self._streams[key]
            except Exception as error:  # the device has failed
                if from_outside(error):
                    raise
                del self._streams[key]
        return not self._streams
