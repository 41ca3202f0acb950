"""The rows of a device's streams: tensors that wait for a launch, and rows that wait for their copy to the host.

A stream reads, packs and copies its own rows: no stream of the user waits for another because of gpuwatch. A flush, and
the end of a segment of the recorder, send what was read.
"""

from __future__ import annotations

import time

import torch

from ...core.recorder import layout
from ...core.recorder.layout import HeadField
from ...core.recorder.writer import RecorderWriter
from ...core.signal_errors import from_outside
from ..record.notable import NotableFilter
from .captured_rows import CapturedRows
from .device import CLOSE_S, StatsDevice, StreamKey, has_ended, without_modes
from .file_copies import FileCopies
from .grouped_readings import PackedRows
from .kernel_variants import kernel_text
from .passed_readings import PassedReadings
from .reader_choice import ReaderChoice
from .stream_buffer import StreamBuffer, remember
from .torch_reader import TensorReader, TorchReader, fresh_rows

_CAPACITY = layout.VALUES_PER_SEGMENT
_MOST_HELD = 16 << 20
"""Bytes of gradients that wait for a launch: they are not kept alive for longer."""
_kept: list[tuple[FileCopies, PassedReadings]] = []
"""Closed, but copies are still outstanding: their memory is kept as long as the process lives."""


class QueuedRows(ReaderChoice):
    """The part of a DeviceStatsBuffer that has the rows of each stream, and sends them."""

    def __init__(
        self,
        recorder: RecorderWriter,
        device: torch.device,
        driver: StatsDevice,
        reader: TensorReader | None,
        notable: NotableFilter,
    ) -> None:
        super().__init__(driver, reader)
        self.device = device
        """The device of the first tensor that was measured."""
        self._recorder = recorder
        self._fields = recorder.fields
        self._notable = notable
        self._buffers: dict[StreamKey, StreamBuffer] = {}
        self.is_busy = False
        """Rows are being read or sent: whoever comes meanwhile is a signal's handler. device_reads.c sets it, too."""
        self.takes = False
        """A value is taken meanwhile: the segment may end, and is sent, as nothing is half read."""
        self._may_wait = True
        """No waiting tensor was changed by the script so far."""
        self._held_bytes = 0
        self._queued = 0
        """Values whose copy was not started yet. All belong to the current segment or to `_unsent`."""
        self._queued_page = -1
        self._unsent: tuple[int, int] | None = None
        """A segment that ended while the user captured a graph, or within a handler: (offset of its values, page)."""
        self.captured = CapturedRows(self._driver)
        self.passed = PassedReadings(self._driver, self._do)
        """Readings of tensors that pass between ranks. They are sent together with the rows."""
        self._copies = FileCopies(recorder, self._driver, device, self._notable, self._add_note, self.faults.append)
        recorder.on_segment_end = self._segment_ended

    def close(self) -> None:
        """Release the recorder's memory, so that it can be unmapped. Waits some seconds for the outstanding copies.

        The memory that the others go to is never unmapped: the device may still write there.
        """
        self._recorder.on_segment_end = None
        all_arrived = self.passed.close()
        for buffer in self._buffers.values():
            try:
                if not has_ended(self._driver, buffer.key, buffer.stream):
                    all_arrived = False
                    raise TimeoutError(f"a stream has not ended within {CLOSE_S:g} s")
            except Exception as error:
                if from_outside(error):
                    raise
                self._copies.stream_failed(buffer, error)
        without_modes(self._copies.take_arrived, self._buffers.values())
        self._buffers.clear()
        self._queued = 0
        self._unsent = None
        if all_arrived:
            self._copies.close()
        else:
            _kept.append((self._copies, self.passed))

    def hold(self, size: int) -> None:
        """A tensor of so many bytes waits for a launch, and nothing should change it before then.

        If it was changed in place nevertheless, its numbers are lost, and no other one waits.
        """
        self._held_bytes += size
        if self._held_bytes > _MOST_HELD:
            without_modes(self._read_all)

    def _buffer(self, device: torch.device) -> StreamBuffer:
        """The StreamBuffer of the current stream, with rows to read into."""
        key = self._driver.stream_key(device)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = StreamBuffer(key, device, self._driver.stream(device))
        if buffer.rows is None:
            with torch.inference_mode(False):
                buffer.rows = without_modes(self._fresh_rows, buffer)
                without_modes(self.captured.prepare, device)
        return buffer

    def _fresh_rows(self, buffer: StreamBuffer) -> torch.Tensor:
        with self._driver.use(buffer.key, buffer.stream):
            return self._driver.rows(fresh_rows(_CAPACITY, buffer.device))

    def _drop_changed(self, buffer: StreamBuffer) -> int:
        changed = buffer.drop_changed() if buffer.held else 0
        if changed:
            self._may_wait = False
            self._fields[HeadField.ROWS_LOST] += changed
        return changed

    def read_waiting(self) -> None:
        """Read the tensors that wait for a launch. Those of a stream that is being captured keep waiting."""
        if self.is_busy:
            return
        self.is_busy = True
        try:
            self._read_all()
        finally:
            self.is_busy = False

    def _read_all(self) -> None:
        self._held_bytes = 0
        first_error: BaseException | None = None
        for buffer in self._buffers.values():
            if buffer.waiting or buffer.weights:
                with self._driver.use(buffer.key, buffer.stream):
                    try:
                        if not self._driver.is_capturing() and buffer.rows is not None:
                            self._queued -= self._drop_changed(buffer)
                            self._read_waiting(buffer, buffer.rows)
                    except BaseException as error:
                        if first_error is None or from_outside(error):
                            first_error = error  # it is raised when all other streams are read
                        lost = buffer.drop()
                        self._queued -= lost
                        self._fields[_lost_by(error)] += lost
        if first_error is not None:
            raise first_error

    def _read_waiting(self, buffer: StreamBuffer, rows: torch.Tensor) -> None:
        if buffer.waiting or buffer.weights:
            readings = buffer.take_readings()
            self._do("read_many", readings, rows)
            self._driver.keep(readings.tensors, buffer.key, buffer.stream)

    def _follow_checks(self) -> None:
        """Have torch's operations read from now on, if a kernel read known numbers wrongly."""
        if self.is_busy or not self.checks.are_running:
            return
        self.checks.judge()
        if self.checks.wrong is None:
            return
        self._reader, self.reads = TorchReader(), None
        for key, buffer in tuple(self._buffers.items()):
            lost = buffer.drop()
            self._queued -= lost
            self._fields[HeadField.ROWS_LOST] += lost
            # another buffer: no weight keeps the numbers that it has in this one
            self._buffers[key] = StreamBuffer(key, buffer.device, buffer.stream, flying=buffer.flying)
        self.passed.drop()
        self.faults.append(
            f"a kernel of gpuwatch's read known numbers wrongly on {self.device} ({kernel_text(self.checks.wrong)}): "
            "torch's operations read all tensors from now on, with about 30 launches for each"
        )
        self.checks.end()

    @property
    def has_unsent(self) -> bool:
        """Whether rows were read whose copy was not started."""
        return self._queued > 0

    def flush(self) -> None:
        """Start the copies of all rows read so far. Does nothing while the user captures a graph.

        The current segment stays open. Rows that are read into it later are copied later.
        """
        if self.is_busy:
            return
        self._follow_checks()
        self.is_busy = True
        try:
            self._flush()
        finally:
            self.is_busy = False

    def _flush(self) -> None:
        self.passed.flush()
        if not self._queued or self._driver.is_capturing():
            return
        if self._unsent is not None:
            without_modes(self._send, *self._unsent, is_end=True)
        else:
            without_modes(self._send, self._recorder.cursor[0] + layout.VALUES_AT, self._queued_page, is_end=False)

    def finish(self, timeout_s: float | None = None) -> None:
        """Flush, and wait until all numbers have arrived, at most `timeout_s` seconds. See `pending()`.

        While the user captures a graph it neither flushes nor waits.
        """
        if self._driver.is_capturing():
            return
        self.flush()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for buffer in self._buffers.values():
            if buffer.flying:
                left = None if until is None else max(0.0, until - time.monotonic())
                without_modes(self._copies.wait, buffer, left)
        without_modes(self._copies.take_arrived, self._buffers.values())

    def _segment_ended(self, values_at: int, page: int) -> None:
        is_busy, takes, ended = self.is_busy, self.takes, self._unsent or (values_at, page)
        if is_busy and not takes:
            if page == self._queued_page:  # a handler has ended it while a row is read, which the next value sends
                self._keep_unsent(values_at, page)
        elif self._queued:
            self.is_busy, self.takes = True, False
            try:
                if self._driver.is_capturing():
                    # Nothing may be launched during a capture. Nothing is measured either, so the rows can stay.
                    self._keep_unsent(values_at, page)
                else:
                    without_modes(self._send, *ended, is_end=True)
            finally:
                self.is_busy, self.takes = is_busy, takes
        if self._copies.of_segment:
            self._recorder.pass_over(self._may_be_written)

    def _keep_unsent(self, values_at: int, page: int) -> None:
        if self._unsent is None:
            self._unsent = (values_at, page)
            self._copies.hold_segment(values_at, self)

    def _send(self, values_at: int, page: int, *, is_end: bool) -> None:
        """Start the copies of all rows read so far, into the segment whose values begin at `values_at`."""
        self.passed.flush()
        if self._unsent == (values_at, page):
            self._unsent = None
            self._copies.release_segment(values_at, self)
        lost = not self._has_room(values_at)
        if lost and not is_end:
            return  # there may be room when the segment ends
        self._queued = 0
        first_error: BaseException | None = None  # the rows of the other streams must still be sent for this segment
        for buffer in self._buffers.values():
            if buffer.positions:
                with self._driver.use(buffer.key, buffer.stream):
                    try:
                        if not self._driver.is_capturing():
                            self._drop_changed(buffer)
                            if buffer.positions:
                                self._send_stream(buffer, page, values_at, lost)
                        elif is_end:  # a graph is captured on this stream, while another one is current
                            self._fields[HeadField.ROWS_LOST] += buffer.drop()
                        else:
                            self._queued += len(buffer.positions)
                    except BaseException as error:
                        if first_error is None or from_outside(error):
                            first_error = error
        if first_error is not None:
            raise first_error

    def _has_room(self, values_at: int) -> bool:
        """Whether copies into the segment whose values begin here may be started.

        An issued copy cannot be cancelled, so a segment is not reused before its copies have arrived. Half of the
        segments are kept free of outstanding copies. If the device works, the host is never this far ahead of it.
        """
        half, busy = self._fields[HeadField.SEGMENTS] // 2, self._copies.of_segment
        if values_at not in busy and len(busy) >= half:
            self._copies.take_arrived(self._buffers.values())
            return len(busy) < half
        return True

    def _send_stream(self, buffer: StreamBuffer, page: int, values_at: int, lost: bool) -> None:
        """Start the copies of one stream, which must be current."""
        positions, buffer.positions = buffer.positions, []
        remembered, buffer.remembered = buffer.remembered, []
        limits, buffer.limits = buffer.limits, {}
        outstanding, lost_by = len(buffer.flying), HeadField.ROWS_LOST
        try:
            packed = self._pack(buffer, positions[0], positions[-1] + 1)
            remember(remembered, PackedRows(packed, packed.data_ptr()), positions[0])
            if not lost:
                guarded = self.checks.are_running
                self._copies.start(buffer, page, values_at, packed, positions, limits, guarded)
        except BaseException as error:
            lost_by = _lost_by(error)
            raise
        finally:
            if len(buffer.flying) == outstanding:
                self._fields[lost_by] += len(positions)

    def _pack(self, buffer: StreamBuffer, first: int, end: int) -> torch.Tensor:
        rows, buffer.rows = buffer.rows, None  # after an error they are not reset, and must not be read into
        assert rows is not None
        self._read_waiting(buffer, rows)
        packed: torch.Tensor = self._do("pack", rows[first:end], end - first)
        buffer.rows = rows  # they were reset by `pack`
        return packed

    def _may_be_written(self, values_at: int) -> bool:
        """Whether the device may still write into a segment, whose values begin here."""
        if values_at in self._copies.of_segment:
            without_modes(self._copies.take_arrived, self._buffers.values())
        return values_at in self._copies.of_segment

    def collect(self) -> list[int]:
        """The pages in which notable numbers have arrived since the last call, in ascending order. Never waits.

        A page with outstanding numbers may be returned again by a later call.
        """
        if not self._driver.is_capturing():
            self.captured.drop()
        self._follow_checks()
        without_modes(self._copies.take_arrived, self._buffers.values())
        found = sorted(self._copies.notable_pages)
        self._copies.notable_pages.clear()
        return found

    def pending(self, page: int) -> bool:
        """Whether a value of the page is outstanding."""
        return bool(self._copies.of_page.get(page)) or (self._queued > 0 and self._queued_page == page)

    @property
    def stream_key(self) -> StreamKey:
        """The current stream of the device."""
        return self._driver.stream_key(self.device)

    @property
    def is_capturing(self) -> bool:
        """Whether the user captures a graph, so that the host must not wait for the device."""
        return self._driver.is_capturing()

    @property
    def flying(self) -> int:
        """The number of outstanding copies."""
        return sum(map(len, self._copies.of_page.values()))


def _lost_by(error: BaseException) -> HeadField:
    """What counts the rows that were lost by an exception."""
    return HeadField.ROWS_INTERRUPTED if from_outside(error) else HeadField.ROWS_LOST
