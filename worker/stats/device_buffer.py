"""TensorStats of tensors on a device: computed there, kept there, and copied into the recorder without waiting.

Each tensor is read into a row on its device (device_reader.py), on the stream that is current when its hook runs.
Tensors that nothing can change meanwhile are read together, in one launch: see `together` and `frame`. A flush, and
the end of a segment, pack the rows into the recorder's format and start one asynchronous copy per run of rows. The
mapped file is registered with the driver, so the numbers arrive in it without Python, even while the rank is blocked in
a collective. `collect()` handles the numbers that have arrived, and never waits.

Every stream of every device has its own rows, and packs and copies them itself. No stream of the user waits for another
because of gpuwatch.

Like the recorder, it must be called by one thread at a time.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from ...core.judge import WarningLimits
from ...core.recorder import layout
from ...core.recorder.layout import HeadField, SegmentField
from ...core.recorder.writer import RecorderWriter
from ...core.values import PENDING
from .device import device_for
from .device_interface import StatsDevice, StreamKey
from .notable import NotableFilter
from .passed_readings import PassedReadings
from .stream_buffer import DeviceRow as DeviceRow
from .stream_buffer import RowBlock, RowCopy, StreamBuffer, remember, runs
from .tensor_stats import version_of
from .torch_reader import (
    KnownWeight,
    PackedRows,
    TensorReader,
    TensorSource,
    TorchReader,
    WaitingTensors,
    dense,
    fresh_rows,
    source_of,
)
from .triton_reader import TritonReader
from .without_modes import without_modes

_CAPACITY = layout.VALUES_PER_SEGMENT


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
        """What does not work as it should, and what that costs. Empty if all is well. It may grow."""
        self.not_seen_in_graphs = 0
        """Calls that measured nothing because the user captured a graph."""
        self._notable = notable or NotableFilter(WarningLimits())
        self._driver = driver or device_for(device)
        self._recorder = recorder
        self._fields = recorder.fields
        self._memory = recorder.memory
        self._reader = reader or self._best_reader()
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
            self._file = without_modes(torch.frombuffer, self._memory, dtype=torch.int64)
        self._numbers: Any = numpy.frombuffer(self._memory, dtype=numpy.int64)
        """The same memory for reading: the script's modes do not see NumPy."""
        self._buffers: dict[StreamKey, StreamBuffer] = {}
        self._last: tuple[StreamBuffer, int] | None = None
        self._together = False
        """Tensors that are measured wait for one launch."""
        self._queued = 0
        """Values whose copy was not started yet. All belong to the current segment or to `_unsent`."""
        self._queued_page = -1
        self._unsent: tuple[int, int] | None = None
        """A segment that ended while the user captured a graph: (offset of its values, page)."""
        self._of_segment: Counter[int] = Counter()
        """Offset of a segment's values -> outstanding copies into the segment."""
        self._of_page: Counter[int] = Counter()
        """Page -> outstanding copies of its values."""
        self._notable_pages: set[int] = set()
        """Pages that the next `collect()` returns."""
        self._anchor: Any = ctypes.c_char.from_buffer(self._memory)  # prevents the memory from being unmapped
        self.passed = PassedReadings(self._driver, self._do)
        """What passes between ranks. It is sent together with the rows."""
        self._register()
        recorder.on_segment_end = self._segment_ended

    def _best_reader(self) -> TensorReader:
        if self._driver.type != "cuda":
            return TorchReader()
        try:
            reader = TritonReader()
            if not reader.interpreted:
                return reader
            self._add_note(_no_kernel("Triton runs in its interpreter"))
        except Exception as error:  # an incompatible Triton may raise anything
            self._add_note(_no_kernel(_first_line(error)))
        return TorchReader()

    def _add_note(self, what: str) -> None:
        if what not in self.note:
            self.note = f"{self.note}; {what}" if self.note else what

    def _register(self) -> None:
        try:
            refusal = self._driver.register(ctypes.addressof(self._anchor), len(self._memory), self.device)
        except Exception as error:  # a torch version without the call
            refusal = _first_line(error)
        self._registered = not refusal
        if refusal:
            from .device import file_system_of  # psutil is imported where it is needed alone

            self._add_note(
                f"the driver does not take the recorder's memory ({refusal}; {self._recorder.path} is on "
                f"{file_system_of(self._recorder.path)}): its numbers come through pinned memory, and a rank that "
                "hangs or dies loses those that it has not yet fetched from there"
            )

    def close(self) -> None:
        """Release the recorder's memory, so that it can be unmapped. Waits for the outstanding copies."""
        self._recorder.on_segment_end = None
        self.passed.close()
        for buffer in self._buffers.values():
            with self._driver.use(buffer.key, buffer.stream):
                try:
                    self._driver.synchronize(buffer.stream)
                except Exception as error:
                    self._stream_failed(buffer, error)
        without_modes(self._take_arrived)
        self._buffers.clear()
        self._of_segment.clear()
        self._of_page.clear()
        self._queued = 0
        self._last = self._unsent = None
        if self._registered:
            self._registered = False
            self._driver.unregister(ctypes.addressof(self._anchor), self.device)
        self._file = torch.empty(0, dtype=torch.int64, device="cpu")
        self._numbers = None
        self._anchor = None

    # -- the tensors of a frame ---------------------------------------------------------------------------------

    def frame(
        self, tensors: Sequence[torch.Tensor], elements: Sequence[int], earlier: Sequence[Any], count: bool = False
    ) -> tuple[list[int | None], list[DeviceRow | None]]:
        """Start to read the tensors of a frame; the last ones, as many as `earlier`, are its weights.

        Returns for each tensor the index of its value in the page, None if it cannot be measured; and for each weight
        the row to pass in as `earlier` the next time. `elements`: how many lie in one piece of the tensor's memory, in
        order; 0 if the caller does not know. `count`: also count zeros and subnormals, of dtypes of low precision.
        Gradients must be off.

        With the row of an earlier reading a weight keeps the numbers of that reading, unless something that was
        read before it in this segment is non-finite. Then it is read again: something other than the optimizer may have
        changed it. The device decides that, for all such weights in one launch before the rows are copied. So a frame's
        other tensors must be read before its weights.
        """
        indices: list[int | None] = []
        rows: list[DeviceRow | None] = []
        values = len(tensors) - len(earlier)
        captured = self._driver.is_capturing()  # a read would become a part of the user's graph
        for place, tensor in enumerate(tensors):
            index = None
            if self._driver.holds(tensor):
                if captured:
                    self.not_seen_in_graphs += 1
                else:
                    before = earlier[place - values] if place >= values else None
                    index = self._measure(tensor, elements[place], count, before)
            indices.append(index)
            if place >= values:
                rows.append(self._remember(earlier[place - values]) if index is not None else None)
        return indices, rows

    def read_frame(
        self,
        tensor: torch.Tensor,
        fresh: list[torch.Tensor],
        elements: list[int],
        values: int,
        known: list[KnownWeight],
        count: bool,
    ) -> tuple[int, list[DeviceRow]] | None:
        """As `frame`, for tensors and weights about which the native writer has found out all that there is.

        All are on the device of `tensor`. Each of `fresh` has so many `elements`, in one piece of its storage, in
        order. The first `values` of them are no weights. `known` are weights that were read before. The values lie side
        by side, those of `fresh` first. Returns the index of the first, and a row for each weight in `fresh`; None, and
        nothing is done, if `frame` must do it.
        """
        page = self._recorder.page
        assert page is not None
        if self._unsent is not None or not self._driver.holds(tensor) or self._driver.is_capturing():
            return None
        buffer = self._buffer(tensor.device)
        for weight in known:
            if not _is_packed(weight[3], buffer):
                return None
        number = len(fresh) + len(known)
        index, first = self._recorder.values(number, PENDING)
        behind = first + len(fresh)
        self._queued_page = page.number
        self._queued += number
        buffer.positions.extend(range(first, first + number))
        rows: list[DeviceRow] = []
        if values < len(fresh):
            rows = [DeviceRow(buffer) for _ in range(values, len(fresh))]
            buffer.remembered.append((first + values, rows))
        if known:
            buffer.weights.append(WaitingTensors(known, behind, count))
            buffer.remembered.append((behind, [weight[3] for weight in known]))
        if fresh and self._together:
            buffer.waiting.append(WaitingTensors(fresh, first, count))
        elif fresh:
            self._read(list(map(dense, fresh, elements)), buffer, first, count)
        return index, rows

    def _measure(self, tensor: torch.Tensor, elements: int, count: bool, before: Any) -> int | None:
        buffer = self._buffer(tensor.device)
        kept: DeviceRow | None = before if _is_packed(before, buffer) else None
        source = _source_of(tensor, elements) if kept is None else None
        if source is None and kept is None:
            return None
        index = self._next_value()
        position = self._recorder.value_position
        self._last = (buffer, position)
        if kept is not None and self._begins_segment():
            source = _source_of(tensor, elements)
        if source is None:
            known = KnownWeight(weakref.ref(tensor), version_of(tensor), 0, kept)
            buffer.weights.append(WaitingTensors([known], position, count))
        elif self._together:
            buffer.waiting.append(WaitingTensors([source], position, count))
        else:
            self._read([source], buffer, position, count)
        buffer.positions.append(position)
        self._queued += 1
        limit = self._notable.wide_limit(tensor.dtype)
        if limit is not None:
            buffer.limits[position] = limit
        return index

    def _remember(self, before: Any) -> DeviceRow:
        """The last weight's row: the one `before` if it is of this stream."""
        assert self._last is not None
        buffer, position = self._last
        row: DeviceRow = before if _is_packed(before, buffer) else DeviceRow(buffer)
        buffer.remembered.append((position, [row]))
        return row

    def _begins_segment(self) -> bool:
        """Whether the rest of this frame may be in the segment before, whose rows are reset."""
        at = self._recorder.cursor[0] // 8
        return bool(self._numbers[at + SegmentField.FRAMES] == 0 and self._numbers[at + SegmentField.VALUE_BASE] > 0)

    def _buffer(self, device: torch.device) -> StreamBuffer:
        """The StreamBuffer of the current stream, with rows to read into."""
        key = self._driver.stream_key(device)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = StreamBuffer(key, device, self._driver.stream(device))
        if buffer.rows is None:
            with torch.inference_mode(False):
                buffer.rows = without_modes(self._fresh_rows, buffer)
        return buffer

    def _fresh_rows(self, buffer: StreamBuffer) -> torch.Tensor:
        with self._driver.use(buffer.key, buffer.stream):
            return self._driver.rows(fresh_rows(_CAPACITY, buffer.device))

    def _next_value(self) -> int:
        """Reserve the next value of the page. Returns its index."""
        if self._unsent is not None:
            without_modes(self._send, *self._unsent, is_end=True)
        index = self._recorder.value(0, 0, PENDING)  # may end the previous segment
        assert self._recorder.page is not None
        self._queued_page = self._recorder.page.number
        return index

    def _read(self, sources: list[TensorSource], buffer: StreamBuffer, first: int, count: bool) -> None:
        rows = buffer.rows
        assert rows is not None
        with self._driver.use(buffer.key, buffer.stream):
            for position, source in enumerate(sources, first):
                self._do("read", source, rows, position, count)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is measured in this context is read when it ends: by one launch for all tensors of a dtype and segment.

        Nothing of the script may run in it: it could change the tensors, or free them.
        """
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self.read_waiting()

    def read_waiting(self) -> None:
        """Read the tensors that wait for a launch. Those of a stream that is captured go on waiting."""
        first_error: Exception | None = None
        for buffer in self._buffers.values():
            if buffer.waiting or buffer.weights:
                with self._driver.use(buffer.key, buffer.stream):
                    try:
                        if not self._driver.is_capturing() and buffer.rows is not None:
                            self._read_waiting(buffer, buffer.rows)
                    except Exception as error:
                        lost = buffer.drop()
                        self._queued -= lost
                        self._fields[HeadField.ROWS_LOST] += lost
                        first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _read_waiting(self, buffer: StreamBuffer, rows: torch.Tensor) -> None:
        if buffer.waiting or buffer.weights:
            self._do("read_many", buffer.take_readings(), rows)

    def _do(self, method: str, *arguments: Any) -> Any:
        """Have a method of the reader do something. If it fails, have torch's operations do it, from now on as well.

        Triton may lack a compiler, a cache folder or support for the device. Where torch's operations fail too, it was
        the device.
        """
        try:
            return getattr(self._reader, method)(*arguments)
        except Exception as error:
            if isinstance(self._reader, TorchReader):
                raise
            reader = TorchReader()
            done = getattr(reader, method)(*arguments)
            self._reader = reader
            self._add_note(_no_kernel(_first_line(error)))
            return done

    # -- copies to the host -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Start the copies of all rows read so far. Does nothing while the user captures a graph.

        The current segment stays open. Rows that are read into it later are copied later.
        """
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
                without_modes(self._wait, buffer, left)
        without_modes(self._take_arrived)

    def _segment_ended(self, values_at: int, page: int) -> None:
        if self._queued:
            if self._driver.is_capturing():
                # Nothing may be launched during a capture. Nothing is measured either, so the rows can stay in place.
                if self._unsent is None:
                    self._unsent = (values_at, page)
                    self._of_segment[values_at] += 1
            else:
                without_modes(self._send, *(self._unsent or (values_at, page)), is_end=True)
        self._avoid_busy_segments()

    def _send(self, values_at: int, page: int, *, is_end: bool) -> None:
        """Start the copies of all rows read so far, into the segment whose values begin at `values_at`."""
        self.passed.flush()
        if self._unsent is not None:
            self._unsent = None
            self._segment_copy_done(values_at)
        # An issued copy cannot be cancelled, so a segment is not reused before its copies have arrived. Half of the
        # segments are kept free of outstanding copies. If the device works, the host is never this far ahead of it.
        lost = False
        half = self._fields[HeadField.SEGMENTS] // 2
        if values_at not in self._of_segment and len(self._of_segment) >= half:
            self._take_arrived()
            lost = len(self._of_segment) >= half
            if lost and not is_end:
                return  # there may be room when the segment ends
        self._queued = 0
        first_error: Exception | None = None  # the rows of the other streams must still be sent for this segment
        for buffer in self._buffers.values():
            if buffer.positions:
                with self._driver.use(buffer.key, buffer.stream):
                    try:
                        if not self._driver.is_capturing():
                            self._send_stream(buffer, RowCopy(page, values_at), lost)
                        elif is_end:  # a graph is captured on this stream, while another one is current
                            self._fields[HeadField.ROWS_LOST] += buffer.drop()
                        else:
                            self._queued += len(buffer.positions)
                    except Exception as error:
                        first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _send_stream(self, buffer: StreamBuffer, copy: RowCopy, lost: bool) -> None:
        """Start the copies of one stream, which must be current."""
        positions, buffer.positions = buffer.positions, []
        remembered, buffer.remembered = buffer.remembered, []
        copy.limits, buffer.limits = buffer.limits, {}
        started = False
        try:
            block = self._pack(buffer, positions)
            remember(remembered, PackedRows(block.source, block.source.data_ptr()), positions[0])
            if not lost:
                copy.block, started = block, True
                self._start(block, copy.values_at)
                copy.event = self._driver.record(buffer.stream)
        finally:
            if started:  # an error does not stop copies that were started
                buffer.flying.append(copy)
                self._of_segment[copy.values_at] += 1
                self._of_page[copy.page] += 1
            else:
                self._fields[HeadField.ROWS_LOST] += len(positions)

    def _pack(self, buffer: StreamBuffer, positions: list[int]) -> RowBlock:
        rows, buffer.rows = buffer.rows, None  # after an error they are not reset, and must not be read into
        assert rows is not None
        first, end = positions[0], positions[-1] + 1
        self._read_waiting(buffer, rows)
        packed = self._do("pack", rows[first:end], end - first)
        buffer.rows = rows  # they were reset by `pack`
        return RowBlock(packed, positions, self._staging(packed))

    def _staging(self, source: torch.Tensor) -> torch.Tensor | None:
        return None if self._registered else self._driver.staging(*source.shape, dtype=source.dtype)

    def _start(self, block: RowBlock, values_at: int) -> None:
        if block.staging is not None:
            self._driver.copy(block.source, block.staging)
            return
        begin = block.positions[0]
        for first, end in runs(block.positions):
            target = self._file.as_strided((end - first, 3), (3, 1), values_at // 8 + first * 3)
            self._driver.copy(block.source[first - begin : end - begin], target)

    def _avoid_busy_segments(self) -> None:
        """Have the recorder pass over the segments with outstanding copies."""
        if not self._of_segment:
            return
        number = self._fields[HeadField.SEGMENTS]
        first = layout.HEADER_BYTES + self._fields[HeadField.LOG_BYTES] + layout.VALUES_AT
        for step in range(number):
            values_at = first + (self._recorder._segment + 1) % number * layout.SEGMENT_BYTES
            if step == 0 and values_at in self._of_segment:
                without_modes(self._take_arrived)
            if values_at not in self._of_segment:
                break
            self._recorder._segment += 1

    # -- numbers that have arrived ------------------------------------------------------------------------------

    def collect(self) -> list[int]:
        """The pages in which notable numbers have arrived since the last call, in ascending order. Never waits.

        A page with outstanding numbers may be returned again by a later call.
        """
        without_modes(self._take_arrived)
        found = sorted(self._notable_pages)
        self._notable_pages.clear()
        return found

    def pending(self, page: int) -> bool:
        """Whether a value of the page is outstanding."""
        return self._of_page[page] > 0 or (self._queued > 0 and self._queued_page == page)

    @property
    def is_capturing(self) -> bool:
        """Whether the user captures a graph, so that the host must not wait for the device."""
        return self._driver.is_capturing()

    @property
    def flying(self) -> int:
        """The number of outstanding copies."""
        return self._of_page.total()

    def _take_arrived(self) -> None:
        if not self._of_page or self._driver.is_capturing():  # querying an event would break the user's capture
            return
        arrived: list[RowCopy] = []
        for buffer in self._buffers.values():
            if not buffer.flying:
                continue
            with self._driver.use(buffer.key, buffer.stream):
                try:
                    while (
                        buffer.flying and not self._driver.is_capturing() and self._driver.query(self._event_of(buffer))
                    ):
                        arrived.append(buffer.flying.popleft())
                except Exception as error:
                    self._stream_failed(buffer, error)
        for copy in arrived:
            self._copy_arrived(copy)
        if arrived:
            self._filter(arrived)

    def _wait(self, buffer: StreamBuffer, timeout_s: float | None) -> None:
        """Wait for the last copy of a stream."""
        with self._driver.use(buffer.key, buffer.stream):
            if self._driver.is_capturing():
                return
            try:
                self._driver.wait(self._event_of(buffer, -1), timeout_s)
            except Exception as error:
                self._stream_failed(buffer, error)

    def _event_of(self, buffer: StreamBuffer, which: int = 0) -> Any:
        copy = buffer.flying[which]
        if copy.event is None:  # an error occurred before it was recorded
            copy.event = self._driver.record(buffer.stream)
        return copy.event

    def _stream_failed(self, buffer: StreamBuffer, error: Exception) -> None:
        """The device has failed: no copy of this stream will arrive. The user's next call will raise the same error.

        Its segments stay in `_of_segment`, since the device may still write into them.
        """
        self._add_note(f"the device does not bring its numbers any more: {_first_line(error)}")
        for copy in buffer.flying:
            self._fields[HeadField.ROWS_LOST] += len(copy.block.positions)
            self._page_copy_done(copy.page)
        buffer.flying.clear()

    def _copy_arrived(self, copy: RowCopy) -> None:
        self._segment_copy_done(copy.values_at)
        self._page_copy_done(copy.page)
        block = copy.block
        if block.staging is not None:
            at = copy.values_at // 8
            staged = block.staging.numpy()
            target = self._numbers[at : at + 3 * _CAPACITY].reshape(_CAPACITY, 3)
            target[block.positions] = staged[[position - block.positions[0] for position in block.positions]]

    def _segment_copy_done(self, values_at: int) -> None:
        self._of_segment[values_at] -= 1
        if self._of_segment[values_at] <= 0:
            del self._of_segment[values_at]

    def _page_copy_done(self, page: int) -> None:
        self._of_page[page] -= 1
        if self._of_page[page] <= 0:
            del self._of_page[page]

    def _filter(self, copies: list[RowCopy]) -> None:
        """Find the notable pages and rows. All copies are checked at once, and one by one only if that finds any."""
        parts = [self._values_of(copy, copy.block.positions) for copy in copies]
        limited = any(copy.limits for copy in copies)
        notable = limited or self._notable.any(parts[0] if len(parts) == 1 else numpy.concatenate(parts))
        for copy, values in zip(copies, parts, strict=True):
            here = notable and (self._notable.any(values) or self._is_over_limit(copy, copy.limits))
            if here:
                self._notable_pages.add(copy.page)

    def _is_over_limit(self, copy: RowCopy, limits: dict[int, int]) -> bool:
        values = self._values_of(copy, list(limits))
        return any(high >= limit for high, limit in zip(values[:, 1], limits.values(), strict=True))

    def _values_of(self, copy: RowCopy, positions: list[int]) -> Any:
        """The numbers of these values in the file, as an array (n, 3)."""
        at = copy.values_at // 8
        values = self._numbers[at : at + 3 * _CAPACITY].reshape(_CAPACITY, 3)
        if positions and positions[-1] - positions[0] == len(positions) - 1:  # side by side, as nearly always: no copy
            return values[positions[0] : positions[-1] + 1]
        return values[positions]


def _is_packed(row: Any, buffer: StreamBuffer) -> bool:
    """Whether the numbers of an earlier row can be kept. Those of another stream may not be there yet."""
    return isinstance(row, DeviceRow) and row.buffer is buffer and row.packed is not None


def _source_of(tensor: torch.Tensor, elements: int) -> TensorSource | None:
    """As `source_of`. `elements`: see `DeviceStatsBuffer.frame`."""
    if elements:
        return dense(tensor, elements)
    try:
        return source_of(tensor)
    except Exception:  # an unknown tensor class
        return None


def _first_line(error: Exception) -> str:
    """The first line of an error. A compiler's error may have hundreds."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _no_kernel(why: str) -> str:
    return (
        f"no kernel of our own ({why}): torch's operations read each tensor instead, in about 30 launches for one and "
        "several passes over it. Triton needs a C compiler and Python.h on the machine that trains"
    )
