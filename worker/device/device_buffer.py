"""TensorStats of tensors on a device: computed there, kept there, and copied into the recorder without waiting.

Each tensor is read into a row on its device (torch_reader.py), on the stream that is current when its hook runs.
Tensors that nothing can change meanwhile are read together, in one launch: see `together` and `frame`. A flush, and
the end of a segment, pack the rows into the recorder's format and start one asynchronous copy per run of rows into its
file (queued_rows.py, file_copies.py). `collect()` handles the numbers that have arrived, and never waits.

Like the recorder, it must be called by one thread at a time.

A signal's handler may call a module, or communicate, in the middle of what is done here. Until that has been done it
then reads nothing, sends nothing, and the numbers that it would have read are counted (`is_busy`). Else a value could
get the number of another.
"""

from __future__ import annotations

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
from ...core.text import error_text
from ...core.values import PENDING
from ..record.notable import NotableFilter
from ..record.plain_tensor import version_of
from .captured_rows import GraphReads
from .device import DLPACK_TYPES, StatsDevice, device_for, without_modes
from .grouped_readings import KnownWeight, WaitingTensors
from .queued_rows import QueuedRows
from .stream_buffer import DeviceRow as DeviceRow
from .stream_buffer import StreamBuffer
from .tensor_source import TensorSource, dense, source_of
from .torch_reader import FROM_GRAPH, TensorReader, graph_source


class DeviceStatsBuffer(QueuedRows):
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
        notable = notable or NotableFilter(WarningLimits())
        super().__init__(recorder, device, driver or device_for(device), reader, notable)
        self.not_seen_in_graphs = 0
        """Tensors that were not read because the user captured a graph, and replays that were not read."""
        self.why_not_seen = ""
        """Why the first of them was not."""
        self.dlpack_type = DLPACK_TYPES[self._driver.type]
        self._together = False
        """Tensors that are measured wait for one launch."""

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
            self._add_note(f"a tensor of a CUDA graph was not read: {error_text(error)}")
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

    # -- copies to the host -------------------------------------------------------------------------------------

    # -- numbers that have arrived ------------------------------------------------------------------------------


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
