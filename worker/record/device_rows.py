"""Readings of a rank on a device: their numbers arrive later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...core.recorder.writer import OpenPage, RecorderWriter
from ...core.signal_errors import from_outside
from ..device.captured_rows import CAPTURED
from ..device.device import StreamKey, device_for, has_reader, without_modes
from ..device.device_buffer import DeviceRow, DeviceStatsBuffer
from ..device.file_copies import never_free
from ..device.passed_readings import PassedReadings
from .collectives import issued
from .notable import NotableFilter


@dataclass(eq=False, repr=False)
class DeviceRows:
    """The part of a RowWriter that reads tensors on a device. Their numbers arrive later."""

    _recorder: RecorderWriter
    notable: NotableFilter
    _on_fault: Callable[[str, Exception], None]

    def __post_init__(self) -> None:
        self.count = False
        """Count zeros and subnormals in this batch."""
        self.device_buffer: DeviceStatsBuffer | None = None
        self.late_pages: dict[int, OpenPage] = {}
        """Page number -> page, for pages with numbers that have not arrived. AlarmRecorder takes them out."""
        self.sees_captures = False
        """torch says when a capture begins and when a graph is replayed."""
        self.captured_unseen = False
        """The user captured a graph before anything on a device was read."""
        self._device_failed = False
        self._seq = -1
        """Collectives issued before a tensor on a device was last read."""
        self._is_sent = False
        """What was read before the last collective of Python's was sent before it."""

    def device_frame(
        self, tensors: Sequence[torch.Tensor], elements: Sequence[int], earlier: Sequence[Any], count: bool
    ) -> tuple[list[int | None], list[DeviceRow | None]]:
        """For the native writer: see `DeviceStatsBuffer.frame`."""
        self.count = count
        return without_modes(self._device_frame, tensors, elements, earlier)

    def _device_frame(
        self, tensors: Sequence[torch.Tensor], elements: Sequence[int], earlier: Sequence[Any]
    ) -> tuple[list[int | None], list[DeviceRow | None]]:
        page, buffer = self._recorder.page, None
        for tensor in tensors:
            buffer = self._buffer_for(tensor.device)
            if buffer is not None:
                break
        if buffer is None or page is None:
            return [None] * len(tensors), [None] * len(earlier)
        found = buffer.frame(tensors, elements, earlier, self.count)
        if any(index is not None and index < CAPTURED for index in found[0]):
            self.late_pages[page.number] = page
        return found

    def passed_on(self, device: torch.device) -> PassedReadings | None:
        """The reader of tensors on a device that pass between ranks; None if they cannot be read."""
        buffer = self._buffer_on(device)
        return buffer.passed if buffer is not None else None

    def _buffer_for(self, device: torch.device) -> DeviceStatsBuffer | None:
        """The buffer for tensors on a device; None if they cannot be read. Earlier readings may be sent now."""
        buffer = self._buffer_on(device)
        if buffer is not None:
            self._send_after_collectives(buffer, issued())
        return buffer

    def _buffer_on(self, device: torch.device) -> DeviceStatsBuffer | None:
        if self.device_buffer is None:
            if self._device_failed or not has_reader(device):
                return None
            try:
                if device_for(device).is_capturing():  # the driver must not be asked to register memory now
                    self.captured_unseen = True
                    return None
                self.device_buffer = DeviceStatsBuffer(self._recorder, device, notable=self.notable)
                self.device_buffer.captured.is_on = self.sees_captures
            except Exception as error:
                if from_outside(error):
                    raise
                # no second attempt: one fault is recorded, and not one in each call
                self._device_failed = True
                self._on_fault("device", error)
                return None
        return self.device_buffer

    def send_before_a_collective(self) -> None:
        """Send the readings of frames: the next operation on the stream is a collective, which may hang."""
        buffer = self.device_buffer
        if buffer is not None:
            # Copies to the host that stand behind a collective on the stream arrive when it ends. If a peer never
            # comes, they would never arrive, and the frames that explain the hang would be missing.
            if buffer.has_unsent:
                buffer.flush()
            self._is_sent = True

    def _send_after_collectives(self, buffer: DeviceStatsBuffer, seq: int) -> None:
        """Send the earlier readings if a collective was issued since of which nobody has told: torch's C++ did."""
        if seq != self._seq:
            self._seq = seq
            if not self._is_sent:
                buffer.flush()
            self._is_sent = False

    def never_free(self) -> None:
        """The device has failed."""
        never_free(self.device_buffer)

    def close(self) -> None:
        """Release the recorder's memory. Waits for outstanding numbers of a device."""
        buffer, self.device_buffer = self.device_buffer, None
        if buffer is not None:
            buffer.close()

    @property
    def stream(self) -> StreamKey | None:
        """The current stream; None if nothing on a device was read so far."""
        return self.device_buffer.stream_key if self.device_buffer is not None else None

    @property
    def is_capturing(self) -> bool:
        """Whether the user captures a graph on the current stream."""
        return self.device_buffer is not None and self.device_buffer.is_capturing

    def together(self) -> AbstractContextManager[None]:
        """See `DeviceStatsBuffer.together`."""
        return self.device_buffer.together() if self.device_buffer is not None else nullcontext()

    def read_waiting(self) -> None:
        """The memory of weights may be freed now: deal with those on a device that wait for a launch."""
        if self.device_buffer is not None:
            without_modes(self.device_buffer.read_waiting)

    def flush(self) -> None:
        """Send the numbers that were read on a device to the recorder now."""
        if self.device_buffer is not None:
            self.device_buffer.flush()
