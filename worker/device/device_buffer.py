"""TensorStats of tensors on a device: computed there, kept there, and copied into the recorder without waiting.

Each tensor is read into a row on its device (torch_reader.py), on the stream that is current when its hook runs.
Tensors that nothing can change meanwhile are read together, in one launch: see `together` and `frame`. A flush, and
the end of a segment, pack the rows into the recorder's format and start one asynchronous copy per run of rows into its
file (stream_buffer.py). `collect()` handles the numbers that have arrived, and never waits.

Every stream of every device has its own rows, and packs and copies them itself. No stream of the user waits for another
because of gpuwatch.

Like the recorder, it must be called by one thread at a time.

A signal's handler may call a module, or communicate, in the middle of what is done here. Until that has been done it
then reads nothing, sends nothing, and the numbers that it would have read are counted (`is_busy`). Else a value could
get the number of another.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...core.judge import WarningLimits
from ...core.recorder import layout
from ...core.recorder.layout import HeadField, SegmentField
from ...core.recorder.writer import RecorderWriter
from ...core.signal_errors import from_outside
from ...core.values import PENDING
from ..record.notable import NotableFilter
from ..record.tensor_stats import version_of
from .captured_rows import CapturedRows, GraphReads
from .device import CLOSE_S, DLPACK_TYPES, StatsDevice, StreamKey, device_for, has_ended, without_modes
from .kernel_launcher import KernelLauncher
from .passed_readings import PassedReadings
from .reader_check import ReaderChecks
from .stream_buffer import DeviceRow as DeviceRow
from .stream_buffer import FileCopies, StreamBuffer, first_line, remember
from .torch_reader import (
    FROM_GRAPH,
    KnownWeight,
    PackedRows,
    TensorReader,
    TensorSource,
    TorchReader,
    WaitingTensors,
    dense,
    fresh_rows,
    graph_source,
    source_of,
)
from .triton_reader import TritonReader, kernel_text

_CAPACITY = layout.VALUES_PER_SEGMENT
_MOST_HELD = 16 << 20
"""Bytes of gradients that wait for a launch: they are not kept alive for longer."""
_kept: list[tuple[FileCopies, PassedReadings]] = []
"""Closed, but copies are still outstanding: their memory is kept as long as the process lives."""


class DeviceStatsBuffer:
    """The device side of one recorder, for all devices of the same kind as `device` in this process.

    `collect()` names the pages with a number that is `notable`.
    """

    def __init__(
        self,
        recorder: RecorderWriter,
        device: torch.device,
        *,
        driver: StatsDevice | None = None,
        reader: TensorReader | None = None,
        notable: NotableFilter | None = None,
    ) -> None:
        self.device = device
        """The device of the first tensor that was measured."""
        self.note = ""
        """A defect and its consequence; empty if all is well. It may grow."""
        self.not_seen_in_graphs = 0
        """Tensors that were not read because the user captured a graph, and replays that were not read."""
        self.why_not_seen = ""
        """Why the first of them was not."""
        self._notable = notable or NotableFilter(WarningLimits())
        self._driver = driver or device_for(device)
        self.checks = ReaderChecks(self._driver)
        """Of the kernels of its own reader."""
        self.faults: list[str] = []
        """What gave wrong numbers on known ones, and what reads instead. The caller takes them out."""
        self.dlpack_type = DLPACK_TYPES[self._driver.type]
        self._recorder = recorder
        self._fields = recorder.fields
        self._reader = reader or self._best_reader()
        self.reads = self._reader.reads if isinstance(self._reader, TritonReader) else None
        """The kernels that the native writer may launch itself."""
        self._buffers: dict[StreamKey, StreamBuffer] = {}
        self.is_busy = False
        """Rows are being read or sent: whoever comes meanwhile is a signal's handler. device_reads.c sets it, too."""
        self.takes = False
        """A value is taken meanwhile: the segment may end, and is sent, as nothing is half read."""
        self._together = False
        """Tensors that are measured wait for one launch."""
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

    def _best_reader(self) -> TensorReader:
        if self._driver.type != "cuda":
            return TorchReader()
        try:
            reader = TritonReader(launcher=KernelLauncher(self._add_note, add_fault=self.faults.append))
            reader.checks = self.checks
            if not reader.interpreted:
                return reader
            self._add_note(_no_kernel("Triton runs in its interpreter"))
        except Exception as error:  # an incompatible Triton may raise anything
            if from_outside(error):
                raise
            self._add_note(_no_kernel(first_line(error)))
        return TorchReader()

    def _add_note(self, what: str) -> None:
        if what not in self.note:
            self.note = f"{self.note}; {what}" if self.note else what

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

    # -- the tensors of a frame ---------------------------------------------------------------------------------

    def frame(
        self, tensors: Sequence[torch.Tensor], elements: Sequence[int], earlier: Sequence[Any], count: bool = False
    ) -> tuple[list[int | None], list[DeviceRow | None]]:
        """Start to read the tensors of a frame; the last ones, as many as `earlier`, are its weights.

        Returns for each tensor the index of its value in the page, None if it cannot be measured, `CAPTURED` and more
        if the graph that is captured reads it (captured_rows.py); and for each weight
        the row to pass in as `earlier` the next time. `elements`: how many lie in one piece of the tensor's memory, in
        order; 0 if the caller does not know, FROM_GRAPH if these are the numbers that a compiled graph left of a
        tensor. `count`: also count zeros and subnormals, of dtypes of low precision. Gradients must be off.

        With the row of an earlier reading a weight keeps the numbers of that reading, unless something that was
        read before it in this segment is non-finite. Then it is read again: something other than the optimizer may have
        changed it. The device decides that, for all such weights in one launch before the rows are copied. So a frame's
        other tensors must be read before its weights.
        """
        if self.is_busy:
            self._fields[HeadField.ROWS_INTERRUPTED] += sum(map(self._driver.holds, tensors))
            return [None] * len(tensors), [None] * len(earlier)
        self.is_busy = True  # no call lies between this and `try`, so no handler runs there
        try:
            return self._frame(tensors, elements, earlier, count)
        finally:
            self.is_busy = self.takes = False

    def _frame(
        self, tensors: Sequence[torch.Tensor], elements: Sequence[int], earlier: Sequence[Any], count: bool
    ) -> tuple[list[int | None], list[DeviceRow | None]]:
        indices: list[int | None] = []
        rows: list[DeviceRow | None] = []
        values = len(tensors) - len(earlier)
        captured = self._driver.is_capturing()  # a read becomes a part of the user's graph
        for place, tensor in enumerate(tensors):
            index, row = None, None
            if self._driver.holds(tensor):
                if captured:
                    index = self._capture(tensor, elements[place], count)
                elif place < values:
                    index, _ = self._measure(tensor, elements[place], count, None, is_weight=False)
                else:
                    index, row = self._measure(tensor, elements[place], count, earlier[place - values], is_weight=True)
            indices.append(index)
            if place >= values:
                rows.append(row)
        return indices, rows

    # -- the tensors of a frame that the native writer reads: see device_reads.c -----------------------------------

    def hold(self, size: int) -> None:
        """A tensor of so many bytes waits for a launch, and nothing should change it before then.

        If it was changed in place nevertheless, its numbers are lost, and no other one waits.
        """
        self._held_bytes += size
        if self._held_bytes > _MOST_HELD:
            without_modes(self._read_all)

    def read_rest(
        self,
        buffer: StreamBuffer,
        tensors: list[torch.Tensor],
        elements: list[int],
        launched: int,
        first: int,
        count: bool,
    ) -> None:
        """Read the tensors that were not `launched`: a kernel is not compiled, or another device is the current one."""
        with self._driver.use(buffer.key, buffer.stream):
            about = buffer.rows, first + launched, count
            self._do("read_dense", tensors[launched:], elements[launched:], *about)
            self._driver.keep(tensors, buffer.key, buffer.stream)

    def keep(self, buffer: StreamBuffer, tensors: list[torch.Tensor]) -> None:
        """Reads of these tensors were put on the stream."""
        self._driver.keep(tensors, buffer.key, buffer.stream)

    def _measure(
        self, tensor: torch.Tensor, elements: int, count: bool, before: Any, *, is_weight: bool
    ) -> tuple[int | None, DeviceRow | None]:
        """(index of the value, the row of a weight)"""
        buffer = self._buffer(tensor.device)
        kept: DeviceRow | None = before if _is_packed(before, buffer) else None
        source = _source_of(tensor, elements) if kept is None else None
        if source is None and kept is None:
            return None, None
        index, position = self._next_value()
        if kept is not None and self._begins_segment():
            source = _source_of(tensor, elements)
        if source is None:
            known = KnownWeight(weakref.ref(tensor), version_of(tensor), 0, kept)
            buffer.weights.append(WaitingTensors([known], position, count))
        elif self._together:
            buffer.waiting.append(WaitingTensors([source], position, count))
        else:
            with self._driver.use(buffer.key, buffer.stream):
                self._do("read", source, buffer.rows, position, count)
                self._driver.keep([source.tensor], buffer.key, buffer.stream)
        buffer.positions.append(position)
        self._queued += 1
        limit = self._notable.wide_limit(tensor.dtype)
        if limit is not None:
            buffer.limits[position] = limit
        return index, self._remember(buffer, position, before) if is_weight else None

    def _capture(self, tensor: torch.Tensor, elements: int, count: bool) -> int | None:
        page, frames, index = self._recorder.page, self._recorder.frame_count, None
        try:
            if page is not None:
                index = self.captured.read(self._reader, tensor, elements, page, frames, count)
        except Exception as error:
            if from_outside(error):
                raise
            self._add_note(f"a tensor of a CUDA graph was not read: {first_line(error)}")
        if index is None:
            self.not_seen_in_graph(self.captured.why_not_read())
        return index

    def not_seen_in_graph(self, why: str) -> None:
        """A tensor of a capture, or a replay, was not read."""
        self.not_seen_in_graphs += 1
        self.why_not_seen = self.why_not_seen or why

    def replayed(self, reads: GraphReads, first: int, end: int) -> int:
        """A replay on the current stream fills these rows of a graph, VALUES_PER_SEGMENT at most: start their copy.

        They are fresh for the next replay. Returns the index in the page of the first one's value.
        """
        page, buffer, count = self._recorder.page, self._buffer(reads.device), end - first
        assert page is not None
        index, position, values_at = self._recorder.values(count, PENDING)
        packed: torch.Tensor = self._do("pack", reads.rows[first:end], count)
        if self._has_room(values_at):
            positions, guarded = list(range(position, position + count)), self.checks.are_running
            self._copies.start(buffer, page.number, values_at, packed, positions, {}, guarded)
        else:
            self._fields[HeadField.ROWS_LOST] += count
        return index

    def _remember(self, buffer: StreamBuffer, position: int, before: Any) -> DeviceRow:
        """A weight's row: the one `before` if it is of this stream."""
        row: DeviceRow = before if _is_packed(before, buffer) else DeviceRow(buffer)
        buffer.remembered.append((position, [row]))
        return row

    def _begins_segment(self) -> bool:
        """Whether the rest of this frame may be in the segment before, whose rows are reset."""
        at = self._recorder.cursor[0] // 8
        numbers = self._copies.numbers
        return bool(numbers[at + SegmentField.FRAMES] == 0 and numbers[at + SegmentField.VALUE_BASE] > 0)

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

    def _next_value(self) -> tuple[int, int]:
        """Reserve the next value of the page. Returns its index, and its position in the segment that is written."""
        while True:
            if self._unsent is not None:
                without_modes(self._send, *self._unsent, is_end=True)
            page = self._recorder.page
            assert page is not None
            self.takes = True
            index, position, values_at = self._recorder.values(1, PENDING)  # may end the previous segment
            # without a call from here on: from `takes` on, a handler that ends the segment leaves it to the next value
            self.takes = False
            if self._recorder.cursor[0] + layout.VALUES_AT == values_at and self._unsent is None:
                self._queued_page = page.number
                return index, position
            # else a handler has ended the segment meanwhile: no row names this value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Read the tensors of this context at its end, with one launch for all tensors of a dtype and segment.

        Nothing of the script may run in it: it could change the tensors, or free them.
        """
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self.read_waiting()

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

    def _do(self, method: str, *arguments: Any) -> Any:
        """Have a method of the reader do something. If it fails, have torch's operations do it, from now on as well.

        Triton may lack a compiler, a cache folder or support for the device. Where torch's operations fail too, it was
        the device.
        """
        try:
            done = getattr(self._reader, method)(*arguments)
        except Exception as error:
            if from_outside(error):
                raise
            if isinstance(self._reader, TorchReader):
                raise
            reader = TorchReader()
            done = getattr(reader, method)(*arguments)
            self._reader, self.reads = reader, None
            self._add_note(_no_kernel(first_line(error)))
        if method == "pack" and self.checks.are_running:
            done = self.checks.guarded(done, arguments[0].device)
        return done

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

    # -- copies to the host -------------------------------------------------------------------------------------

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

    # -- numbers that have arrived ------------------------------------------------------------------------------

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


def _is_packed(row: Any, buffer: StreamBuffer) -> bool:
    """Whether the numbers of an earlier row can be kept. Those of another stream may not be there yet."""
    return isinstance(row, DeviceRow) and row.buffer is buffer and row.packed is not None


def _source_of(tensor: torch.Tensor, elements: int) -> TensorSource | None:
    """As `source_of`. `elements`: see `DeviceStatsBuffer.frame`."""
    if elements:
        return dense(tensor, elements) if elements != FROM_GRAPH else graph_source(tensor)
    try:
        return source_of(tensor)
    except Exception as error:  # an unknown tensor class
        if from_outside(error):
            raise
        return None


def _no_kernel(why: str) -> str:
    return (
        f"gpuwatch's own kernel is not available ({why}): torch's operations read each tensor instead, with about 30 "
        "launches and several passes for each. Triton needs a C compiler and Python.h on the machine that trains"
    )
