"""The copies of packed rows into the recorder's mapped file, and the rows that have arrived there.

The mapped file is registered with the driver. The numbers arrive in it without Python, even while the rank is blocked
in a collective.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass
from typing import Any

import numpy
import torch

from ...core.recorder import layout
from ...core.recorder.layout import HeadField
from ...core.recorder.writer import RecorderWriter
from ...core.signal_errors import from_outside, suppress_own
from ...core.text import error_text
from ...core.values import PENDING
from ..record.notable import NotableFilter
from .device import StatsDevice, file_system_of, without_modes
from .stream_buffer import RowCopy, StreamBuffer

_CAPACITY = layout.VALUES_PER_SEGMENT
_MOST_COMPARED = 8
"""Copies into the file, the first ones of a process, that also go through pinned memory and are compared."""


def _are_side_by_side(positions: list[int]) -> bool:
    return positions[-1] - positions[0] == len(positions) - 1


def runs(positions: list[int]) -> list[tuple[int, int]]:
    """Ascending positions as half-open ranges.

    >>> runs([0, 1, 2, 5, 6])
    [(0, 3), (5, 7)]
    """
    if positions and _are_side_by_side(positions):
        return [(positions[0], positions[-1] + 1)]
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found


@dataclass(eq=False, repr=False)
class FileCopies:
    """The outstanding copies of rows into the recorder's mapped file, and the rows that have arrived there."""

    recorder: InitVar[RecorderWriter]
    _driver: StatsDevice
    _device: torch.device
    _notable: NotableFilter
    _add_note: Callable[[str], None]
    _add_fault: Callable[[str], None] = lambda fault: None

    def __post_init__(self, recorder: RecorderWriter) -> None:
        self._fields = recorder.fields
        memory = recorder.memory
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
            self._file = without_modes(torch.frombuffer, memory, dtype=torch.int64)
        self.numbers: Any = numpy.frombuffer(memory, dtype=numpy.int64)
        """The same memory for reading: the script's modes do not see NumPy."""
        # Sets, for a signal's handler may interrupt anything here: to let a copy go twice must not count twice.
        self.of_segment: dict[int, set[object]] = {}
        """Offset of a segment's values -> outstanding copies into the segment, and others that hold it."""
        self.of_page: dict[int, set[object]] = {}
        """Page -> outstanding copies of its values."""
        self.notable_pages: set[int] = set()
        """Pages in which notable numbers have arrived, until the caller takes them."""
        self._anchor: Any = ctypes.c_char.from_buffer(memory)  # prevents the memory from being unmapped
        try:
            refusal = self._driver.register(ctypes.addressof(self._anchor), len(memory), self._device)
        except Exception as error:  # a torch version without the call
            if from_outside(error):
                raise
            refusal = error_text(error)
        self._registered = self._copies_directly = not refusal
        self._compared = 0
        """Of `_MOST_COMPARED`"""
        if self._registered:
            dropped = _DroppedMemory(os.getpid(), self._driver, self._device, self._anchor, self.of_segment)
            self._dropped = weakref.finalize(self, dropped.unregister)
            self._dropped.atexit = False
        if refusal:
            self._add_note(
                f"the driver cannot register the recorder's memory ({refusal}; {recorder.path} is on "
                f"{file_system_of(recorder.path)}): its numbers come through pinned memory, and a rank that hangs or "
                "dies loses those not yet fetched from there"
            )

    def close(self) -> None:
        """Release the recorder's memory. No copy may be outstanding."""
        self.of_segment.clear()
        self.of_page.clear()
        if self._registered:
            self._registered = False
            self._dropped.detach()
            self._driver.unregister(ctypes.addressof(self._anchor), self._device)
        self._file = torch.empty(0, dtype=torch.int64, device="cpu")
        self.numbers = None
        self._anchor = None

    def start(
        self,
        buffer: StreamBuffer,
        page: int,
        values_at: int,
        packed: torch.Tensor,
        positions: list[int],
        limits: dict[int, int],
        guarded: bool = False,
    ) -> None:
        """Start the copy of packed rows to the values `positions` of a segment. The buffer's stream must be current."""
        staging = None
        if not self._copies_directly or self._compared < _MOST_COMPARED:
            staging = self._driver.staging(*packed.shape, dtype=packed.dtype)
        copy = RowCopy(page, values_at, packed, positions, staging, limits, guarded)
        try:
            if staging is not None:
                self._driver.copy(packed, staging)
            if self._copies_directly:
                self._compared += 1
                begin = positions[0]
                for first, end in runs(positions):
                    target = self._file.as_strided((end - first, 3), (3, 1), values_at // 8 + first * 3)
                    self._driver.copy(packed[first - begin : end - begin], target)
            copy.event = self._driver.record(buffer.stream)
        finally:  # an error does not stop copies that were started
            self.hold_segment(values_at, copy)  # first: it must not be written to by another page
            self.of_page.setdefault(page, set()).add(copy)
            buffer.flying.append(copy)

    def take_arrived(self, buffers: Iterable[StreamBuffer]) -> None:
        """Handle the copies of these streams that have arrived. Does nothing while the user captures a graph.

        A copy leaves `flying` once all is done for it: what a signal's handler has interrupted is done again.
        """
        if not self.of_page or self._driver.is_capturing():  # querying an event would break the user's capture
            return
        arrived: list[tuple[StreamBuffer, RowCopy]] = []
        failed: list[tuple[StreamBuffer, Exception]] = []
        for buffer in buffers:
            if not buffer.flying:
                continue
            with self._driver.use(buffer.key, buffer.stream):
                try:
                    for copy in tuple(buffer.flying):
                        if self._driver.is_capturing() or not self._driver.query(self._event_of(buffer, copy)):
                            break
                        arrived.append((buffer, copy))
                except Exception as error:
                    if from_outside(error):
                        raise
                    failed.append((buffer, error))
        copies = [copy for _, copy in arrived if self._is_held(copy)]
        for copy in copies:
            self._write_staged(copy)
            self._count_held_back(copy)
        if copies:
            self._filter(copies)
        for buffer, copy in arrived:
            self.release_segment(copy.values_at, copy)
            self._page_done(copy)
            if buffer.flying and buffer.flying[0] is copy:
                buffer.flying.popleft()
        for buffer, why in failed:  # what had arrived before is not lost
            self.stream_failed(buffer, why)

    def wait(self, buffer: StreamBuffer, timeout_s: float | None) -> None:
        """Wait for the last copy of a stream."""
        with self._driver.use(buffer.key, buffer.stream):
            if self._driver.is_capturing():
                return
            try:
                self._driver.wait(self._event_of(buffer, buffer.flying[-1]), timeout_s)
            except Exception as error:
                if from_outside(error):
                    raise
                self.stream_failed(buffer, error)

    def _event_of(self, buffer: StreamBuffer, copy: RowCopy) -> Any:
        if copy.event is None:  # an error occurred before it was recorded
            copy.event = self._driver.record(buffer.stream)
        return copy.event

    def stream_failed(self, buffer: StreamBuffer, error: Exception) -> None:
        """The device has failed: no copy of this stream will arrive. The user's next call will raise the same error.

        Its segments stay in `of_segment`, since the device may still write into them.
        """
        self._add_note(f"the device no longer delivers its numbers: {error_text(error)}")
        for copy in buffer.flying:
            self._fields[HeadField.ROWS_LOST] += len(copy.positions)
            self._page_done(copy)
        never_free(list(buffer.flying))
        buffer.flying.clear()

    def _is_held(self, copy: RowCopy) -> bool:
        """False for one that a handler's own forward has let go meanwhile: its segment may have another page's rows."""
        return copy in self.of_segment.get(copy.values_at, ())

    def _write_staged(self, copy: RowCopy) -> None:
        if copy.staging is None:
            return
        staged = copy.staging.numpy()[[each - copy.positions[0] for each in copy.positions]]
        if self._copies_directly and not (self._values_in(copy)[copy.positions] == staged).all():
            self._copies_directly = False
            self._add_fault(
                f"copies from {self._device} into the recorder's memory have other numbers than those into pinned "
                "memory: all go through pinned memory from now on, and a rank that hangs or dies loses those not yet "
                "fetched from there"
            )
        self._values_in(copy)[copy.positions] = staged

    def _count_held_back(self, copy: RowCopy) -> None:
        if copy.guarded:
            copy.guarded = False
            self._fields[HeadField.ROWS_LOST] += int((self._values_of(copy, copy.positions)[:, 2] == PENDING).sum())

    def hold_segment(self, values_at: int, holder: object) -> None:
        """The segment is not used for another page."""
        self.of_segment.setdefault(values_at, set()).add(holder)

    def release_segment(self, values_at: int, holder: object) -> None:
        """It may be, once nothing else holds it."""
        _discard(self.of_segment, values_at, holder)

    def _page_done(self, copy: RowCopy) -> None:
        _discard(self.of_page, copy.page, copy)

    def _filter(self, copies: list[RowCopy]) -> None:
        """Find the notable pages and rows. All copies are checked at once, and one by one only if that finds any."""
        parts = [self._values_of(copy, copy.positions) for copy in copies]
        limited = any(copy.limits for copy in copies)
        notable = limited or self._notable.any(parts[0] if len(parts) == 1 else numpy.concatenate(parts))
        for copy, values in zip(copies, parts, strict=True):
            here = notable and (self._notable.any(values) or self._is_over_limit(copy, copy.limits))
            if here:
                self.notable_pages.add(copy.page)

    def _is_over_limit(self, copy: RowCopy, limits: dict[int, int]) -> bool:
        values = self._values_of(copy, list(limits))
        return any(high >= limit for high, limit in zip(values[:, 1], limits.values(), strict=True))

    def _values_of(self, copy: RowCopy, positions: list[int]) -> Any:
        """The numbers of these values in the file, as an array (n, 3)."""
        values = self._values_in(copy)
        if positions and _are_side_by_side(positions):  # as nearly always: no copy
            return values[positions[0] : positions[-1] + 1]
        return values[positions]

    def _values_in(self, copy: RowCopy) -> Any:
        """All values of the segment, as an array (VALUES_PER_SEGMENT, 3) on the file itself."""
        at = copy.values_at // 8
        return self.numbers[at : at + 3 * _CAPACITY].reshape(_CAPACITY, 3)


def _discard(held: dict[int, set[object]], key: int, holder: object) -> None:
    holders = held.get(key)
    if holders is None:
        return
    holders.discard(holder)
    if not holders:
        held.pop(key, None)


_unmapped_never: list[Any] = []
"""Memory of dropped watches that the device may still write to, or that could not be unregistered just then."""


@dataclass(frozen=True, slots=True)
class _DroppedMemory:
    """A recorder's memory, for a watch that went away with its model and was never closed."""

    pid: int
    driver: StatsDevice
    device: torch.device
    anchor: Any
    of_segment: dict[int, set[object]]

    def unregister(self) -> None:
        """Else the driver refuses the next memory at the same address, and an open capture must not see the call."""
        if os.getpid() != self.pid:
            return
        if self.of_segment or self.driver.is_capturing():
            _unmapped_never.append(self.anchor)
            return
        with suppress_own(Exception):
            self.driver.unregister(ctypes.addressof(self.anchor), self.device)


def never_free(memory: object) -> None:
    """Keep the pinned memory of a device that has failed, also when the process ends.

    To release it torch makes an event. Its error comes out of a destructor, and so aborts the process (torch 2.14).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
