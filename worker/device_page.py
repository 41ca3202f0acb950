"""Numbers of CUDA tensors: computed on the device, kept there, and copied into the recorder without waiting.

For each tensor three numbers (min, max, abs min) go into a row of a device buffer. When a segment of the page is full
or the page ends, the rows are packed into the recorder's own form on the device, and one asynchronous copy per run of
rows brings them into the mapped file, which is registered with the driver: they arrive with no help from Python, even
while the rank is blocked in a collective. What has arrived is looked at by `arrived()`, which never waits.

Nothing here synchronizes with the device. The kernels run on the stream that made the tensor.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ..core.recorder import layout
from ..core.recorder.writer import RecorderWriter
from ..core.values import PENDING, Encoding, NonFinite
from .measure import to_plain

_META = int(Encoding.FLOAT64) << 8


class Unregistered(Exception):
    """The driver does not take the recorder's memory: copies into it would block."""


@dataclass
class _Copy:
    """One segment's rows on their way."""

    page: int
    event: torch.cuda.Event | None
    rows: list[torch.Tensor]
    ends_page: bool


class DevicePages:
    """The device side of one recorder. `device` may be the CPU, for tests: then copies have arrived at once."""

    def __init__(self, recorder: RecorderWriter, device: torch.device) -> None:
        self.device = device
        self._recorder = recorder
        self._numbers = torch.zeros(layout.VALUES_PER_SEGMENT, 3, dtype=torch.float64, device=device)
        self._positions: list[int] = []
        self._streams: list[torch.cuda.Stream] = []
        self._flying: deque[_Copy] = deque()
        self._bad_pages: set[int] = set()
        self._memory = recorder.memory
        self._registered: Any = None
        if device.type == "cuda":
            self._register()
        recorder.on_segment_end = self._segment_ended

    def _register(self) -> None:
        anchor = ctypes.c_char.from_buffer(self._memory)
        result = torch.cuda.cudart().cudaHostRegister(ctypes.addressof(anchor), len(self._memory), 0)  # type: ignore[no-untyped-call]  # torch has no annotation there
        if int(result) != 0:
            raise Unregistered(f"cudaHostRegister returned {int(result)}")
        self._registered = anchor  # keeps the mapping where it is

    # -- one tensor ---------------------------------------------------------------------------------------------

    def measure(self, tensor: torch.Tensor) -> int | None:
        """Queue the reductions of a tensor; returns its value's index in the page, None if it cannot be measured."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # it would become a part of the user's graph
        plain = to_plain(tensor)
        if plain is None or plain.numel() == 0:
            return None
        if plain.dtype is torch.bool:
            plain = plain.view(torch.uint8)
        low, high = torch.aminmax(plain)
        if plain.dtype.is_floating_point:
            least = torch.linalg.vector_norm(plain, -math.inf)
        else:
            least = plain.abs().amin() if plain.dtype.is_signed else low
        return self._put(torch.stack((low, high, least)))

    def last(self) -> torch.Tensor:
        """A copy of the last row, (3,) float64 on the device, for `again`."""
        return self._numbers[self._recorder.value_position].clone()

    def again(self, row: torch.Tensor) -> int:
        """Put a row that was measured for an earlier page into this one."""
        return self._put(row)

    def _put(self, row: torch.Tensor) -> int:
        index = self._recorder.value(0, 0, PENDING)
        position = self._recorder.value_position
        self._numbers[position].copy_(row)
        self._positions.append(position)
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if stream not in self._streams:
                self._streams.append(stream)
        return index

    # -- one segment --------------------------------------------------------------------------------------------

    def _segment_ended(self, values_at: int, page: int, ends_page: bool) -> None:
        positions, self._positions = self._positions, []
        streams, self._streams = self._streams, []
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            rows: list[torch.Tensor] = []
            event: torch.cuda.Event | None = None
            if positions:
                if self.device.type == "cuda":
                    here = torch.cuda.current_stream(self.device)
                    for stream in streams:
                        if stream != here:
                            here.wait_stream(stream)  # orders the streams; the host does not wait
                packed = self._pack(positions[-1] + 1)
                for first, end in runs(positions):
                    row = torch.frombuffer(
                        self._memory, dtype=torch.int64, offset=values_at + first * 24, count=(end - first) * 3
                    ).view(-1, 3)
                    row.copy_(packed[first:end], non_blocking=True)
                    rows.append(row)
                if self.device.type == "cuda":
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation there
                    event.record(torch.cuda.current_stream(self.device))
            self._flying.append(_Copy(page, event, rows, ends_page))
        finally:
            torch._C._set_grad_enabled(grad)

    def _pack(self, count: int) -> torch.Tensor:
        """(count, 3) int64: low bits, high bits, meta, as core.values has them, all as float64."""
        low, high, least = self._numbers[:count].unbind(1)
        largest = torch.maximum(low.abs(), high.abs())
        flags = torch.isnan(largest) * int(NonFinite.NAN)
        flags = flags + (high == math.inf) * int(NonFinite.POSINF) + (low == -math.inf) * int(NonFinite.NEGINF)
        return torch.stack((least.abs().view(torch.int64), largest.abs().view(torch.int64), flags + _META), 1)

    # -- what has come back -------------------------------------------------------------------------------------

    def arrived(self) -> list[int]:
        """Pages that have arrived whole since the last call and hold a non-finite value. Never waits."""
        found: list[int] = []
        while self._flying:
            copy = self._flying[0]
            if copy.event is not None and not copy.event.query():  # type: ignore[no-untyped-call]  # likewise
                break
            self._flying.popleft()
            if any(bool((row[:, 2] & 0xFF).any()) for row in copy.rows):
                self._bad_pages.add(copy.page)
            if copy.ends_page and copy.page in self._bad_pages:
                self._bad_pages.discard(copy.page)
                found.append(copy.page)
        return found

    @property
    def flying(self) -> int:
        """Copies that have not been seen to arrive."""
        return len(self._flying)


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
