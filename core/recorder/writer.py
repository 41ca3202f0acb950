"""The worker's side of a recorder: pages of rows. Every call is a few stores into mapped memory, none waits."""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path

from . import layout
from .layout import HeadField, SegmentEnd, SegmentField
from .recorder_file import RecorderFile

RowTuple = tuple[int, int, int, int, int, int]
"""slot, value, shape, dtype code, kind, mark"""


# A signal's handler may run a forward or record an event, and so write in the middle of what is written here. It runs
# when a call has returned, where a function begins or a loop goes back (CPython's eval breaker), and nowhere between:
# so what must not be torn is written without a call. Another thread gets the GIL at the same places.

# As plain integers: an IntEnum costs more than the store itself.
_FRAMES, _ROWS, _VALUES = int(SegmentField.FRAMES), int(SegmentField.ROWS), int(SegmentField.VALUES)
_FRAME_BASE, _VALUE_BASE = int(SegmentField.FRAME_BASE), int(SegmentField.VALUE_BASE)
_SEGMENT = int(HeadField.SEGMENT)
_CLOSED, _GENERATION = int(SegmentField.CLOSED), int(SegmentField.GENERATION)
_VALUES_PER_SEGMENT, _ROWS_PER_SEGMENT = layout.VALUES_PER_SEGMENT, layout.ROWS_PER_SEGMENT
_FRAMES_PER_SEGMENT = layout.FRAMES_PER_SEGMENT
_pack_value, _frame_bytes = layout.VALUE.pack_into, layout.FRAME.pack


@cache
def _rows_of(count: int) -> struct.Struct:
    """`count` rows, one behind the other."""
    return struct.Struct("<" + layout.ROW.format.lstrip("<") * count)


@cache
def _value_bytes(meta: int) -> bytes:
    """A value whose other numbers are 0."""
    return layout.VALUE.pack(0, 0, meta)


@dataclass(eq=False, slots=True)
class OpenPage:
    """The rows of one batch so far. Whoever holds it may write on in it: the backward comes after other pages."""

    number: int
    root: int
    batch: int
    step: int
    frames: int = 0
    values: int = 0
    """Counts of frames and values, without those of the open segment."""
    losses: int = 0
    """Frames of losses in a page of modules: they do not show that a module is watched."""
    segments: int = 0
    segment: int = -1
    """Its last segment, counted from the beginning of the run."""
    held: list[int] = field(default_factory=list)
    """All its segments, counted likewise."""
    judged: object = None
    """How far it has been judged, for the judge's own use."""
    ended: bool = False
    with_gradients: bool = True
    """Its forward records a graph for a backward."""
    rehearses: bool = False
    """Gradients of its backward mean nothing: their rows have `RowMark.REHEARSED`."""


class RecorderWriter(RecorderFile):
    """One rank's recorder file, open for writing.

    Raises OSError from the constructor when the file cannot be made at its full size (a disk or /dev/shm without
    room); after that nothing here raises for lack of room: what does not fit is counted in the header.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        local_rank: int,
        world_size: int,
        attempt: int,
        log_bytes: int = layout.LOG_BYTES,
        segments: int = layout.SEGMENTS,
    ) -> None:
        super().__init__(
            path,
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            attempt=attempt,
            log_bytes=log_bytes,
            segments=segments,
        )
        self.groups = self.view[layout.GROUPS_AT : layout.STEPS_AT].cast("q")
        """The table of process groups (group_table.py)."""
        self._segments_at = self._log_at + log_bytes
        self._segments = segments
        self._segment = -1
        self._seg = memoryview(array("q", bytes(layout.SEGMENT_HEADER_BYTES)))
        """The header of the segment that is being written."""
        self._frames_at = self._rows_at = self._values_at = 0
        self._pages = 0
        self.page: OpenPage | None = None
        """The page that is being written."""
        self.cursor = array("q", [-1, 0, 0])
        """Offset in the file of the segment that is being written, -1 while there is none; the thread that alone may
        write, 0 while any may; and how many times it has taken the lock.

        Another writer of rows in this process (the worker's compiled one) needs only these and the counts in the
        segment's own header. It need not report to this class what it has written.
        """
        self.on_segment_end: Callable[[int, int], None] | None = None
        """Called with (offset of its values in the file, number of the page) when a segment is done."""

    def segment_at(self, number: int) -> int | None:
        """Offset in the file of a segment, counted from the beginning of the run; None if it was overwritten."""
        if not 0 <= self._segment - number < self._segments:
            return None
        return self._segments_at + (number % self._segments) * layout.SEGMENT_BYTES

    @property
    def value_position(self) -> int:
        """Position of the last value in its segment."""
        return self._seg[_VALUES] - 1

    @property
    def value_count(self) -> int:
        """Values so far in the page that is being written; 0 while there is none."""
        return self._seg[_VALUE_BASE] + self._seg[_VALUES] if self.page is not None else 0

    @property
    def frame_count(self) -> int:
        """Frames so far in the page that is being written; 0 while there is none."""
        return self._seg[_FRAME_BASE] + self._seg[_FRAMES] if self.page is not None else 0

    # -- pages --------------------------------------------------------------------------------------------------

    def begin_page(self, root: int, batch: int, step: int) -> OpenPage:
        """Start a page."""
        page = self.next_page(root, batch, step)
        self.resume_page(page)
        return page

    def next_page(self, root: int, batch: int, step: int) -> OpenPage:
        """A page that takes no room until something is written in it. Pages are counted from 0 over all roots of this
        rank."""
        number = self._pages
        self._pages = number + 1
        fields = self.fields
        fields[HeadField.BATCH], fields[HeadField.ROOT], fields[HeadField.PAGE] = batch, root, number
        return OpenPage(number, root, batch, step)

    def pause_page(self) -> None:
        """Another page comes in between, or nothing for a while: what was written so far may be copied and read."""
        page = self.page
        if page is not None:
            is_open = self.cursor[0] >= 0
            # without a call from here on
            self.page = None
            self.cursor[0] = -1
            if is_open:
                seg = self._seg
                page.frames = seg[_FRAME_BASE] + seg[_FRAMES]
                page.values = seg[_VALUE_BASE] + seg[_VALUES]
                if page.frames > page.losses:
                    self.fields[HeadField.HAS_FRAMES] = 1
                seg[_CLOSED] = SegmentEnd.PAGE_END if page.ended else SegmentEnd.CONTINUED
                self._segment_done(self._values_at, page)
            self.fields[HeadField.MOVED_NS] = time.monotonic_ns()

    def resume_page(self, page: OpenPage) -> None:
        """Write on in a page, in a segment of its own."""
        if self.page is page:
            return
        while self.page is not page:
            self.pause_page()
            self._begin_segment(page)
        fields = self.fields
        fields[HeadField.BATCH], fields[HeadField.ROOT], fields[HeadField.PAGE] = page.batch, page.root, page.number
        fields[HeadField.MOVED_NS] = time.monotonic_ns()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within it other pages may be written. Then the page goes on that was written before, or none."""
        before = self.page
        try:
            yield
        finally:
            if before is None:
                self.pause_page()
            else:
                self.resume_page(before)

    def end_page(self, page: OpenPage) -> None:
        """The batch has ended: nothing more is expected in its page."""
        page.ended = True
        if not page.segments:
            return
        if self.page is page:
            self.pause_page()
        if (at := self.segment_at(page.segment)) is not None:  # else it has been overwritten
            with self.view[at : at + layout.SEGMENT_HEADER_BYTES].cast("q") as head:
                head[_CLOSED] = SegmentEnd.PAGE_END

    def value(self, low: int, high: int, meta: int) -> int:
        """Store the numbers of one tensor; returns its index in the page."""
        assert self.page is not None
        while True:
            seg = self._seg
            used = seg[_VALUES]
            if used < _VALUES_PER_SEGMENT and self.cursor[0] >= 0:
                break
            self.continue_segment()
        at, index = self._values_at + used * 24, seg[_VALUE_BASE] + used
        seg[_VALUES] = used + 1  # before it is written: until then no row names it, so nobody reads it
        _pack_value(self.view, at, low, high, meta)
        return index

    def values(self, count: int, meta: int) -> tuple[int, int, int]:
        """Take `count` values side by side in one segment, all of them (0, 0, meta): their numbers are stored later.

        A segment holds VALUES_PER_SEGMENT. Returns the index of the first in the page, its position in the segment,
        and the offset of the segment's values in the file.
        """
        assert self.page is not None
        taken = _value_bytes(meta) * count
        while True:
            seg = self._seg
            used = seg[_VALUES]
            if used + count <= _VALUES_PER_SEGMENT and self.cursor[0] >= 0:
                break
            self.continue_segment()
        at, index = self._values_at + used * 24, seg[_VALUE_BASE] + used
        seg[_VALUES] = used + count
        self.view[at : at + count * 24] = taken
        return index, used, at - used * 24

    def frame(
        self, module: int, parent: int, depth: int, phase: int, seq: int, rows: Sequence[RowTuple], collectives: int = 0
    ) -> int:
        """Store a finished module call; returns its index in the page. Rows beyond a segment's table are counted."""
        assert self.page is not None
        count = len(rows)
        if count > _ROWS_PER_SEGMENT:
            self.fields[HeadField.ROWS_LOST] += count - _ROWS_PER_SEGMENT
            count = _ROWS_PER_SEGMENT
            rows = rows[:count]
        if depth > 32767:
            depth = 32767
        if collectives > 255:
            collectives = 255
        packed = _rows_of(count).pack(*chain.from_iterable(rows)) if count else b""
        while True:
            seg = self._seg
            frames, used = seg[_FRAMES], seg[_ROWS]
            if frames == _FRAMES_PER_SEGMENT or used + count > _ROWS_PER_SEGMENT or self.cursor[0] < 0:
                self.continue_segment()
                continue
            index = seg[_FRAME_BASE] + frames
            head = _frame_bytes(module, parent, depth, phase, collectives, seq, used, count, index)
            at = self._rows_at + used * 16
            rows_place = slice(at, at + count * 16)
            at = self._frames_at + frames * 32
            frame_place = slice(at, at + 32)
            if self._seg is seg and self.cursor[0] >= 0 and seg[_FRAMES] == frames and seg[_ROWS] == used:
                # nothing else was written meanwhile: without a call from here on
                data = self.view
                data[rows_place] = packed
                data[frame_place] = head
                seg[_ROWS] = used + count
                seg[_FRAMES] = frames + 1
                return index

    def continue_segment(self) -> memoryview:
        """End the open segment, one of whose tables is full, and begin the next one. Returns its header.

        A signal's handler that writes meanwhile finds the page open, but no segment: it begins the next one itself.
        """
        page, seg = self.page, self._seg
        assert page is not None
        if self.cursor[0] >= 0:
            page.frames = seg[_FRAME_BASE] + seg[_FRAMES]
            page.values = seg[_VALUE_BASE] + seg[_VALUES]
            seg[_CLOSED] = SegmentEnd.CONTINUED
            self.cursor[0] = -1
            self._segment_done(self._values_at, page)
        while self.page is page and self.cursor[0] < 0:
            self._begin_segment(page)
        self.resume_page(page)
        return self._seg

    def pass_over(self, is_busy: Callable[[int], bool]) -> None:
        """Leave out the next segments that are busy: somebody else still writes into them. May leave out all.

        `is_busy` is asked with the offset of a segment's values in the file.
        """
        for _ in range(self._segments):
            at = self._segments_at + (self._segment + 1) % self._segments * layout.SEGMENT_BYTES
            if not is_busy(at + layout.VALUES_AT):
                return
            self._segment += 1

    def _segment_done(self, values_at: int, page: OpenPage) -> None:
        if self.on_segment_end is not None:
            self.on_segment_end(values_at, page.number)

    def _begin_segment(self, page: OpenPage) -> None:
        """Begin a segment, and write on in `page` there. Does nothing if another one was begun meanwhile."""
        number = self._segment + 1
        at = self._segments_at + (number % self._segments) * layout.SEGMENT_BYTES
        seg = self.view[at : at + layout.SEGMENT_HEADER_BYTES].cast("q")
        held, now = [number], time.time_ns()
        if self._segment != number - 1 or self.cursor[0] >= 0 or (self.page is not None and self.page is not page):
            return
        # without a call from here on
        generation = seg[_GENERATION]
        generation += generation & 1
        seg[_GENERATION] = generation + 1  # odd while it is written
        seg[SegmentField.PAGE] = page.number
        seg[SegmentField.ROOT] = page.root
        seg[SegmentField.BATCH] = page.batch
        seg[SegmentField.STEP] = page.step
        seg[SegmentField.INDEX] = page.segments
        seg[_FRAMES] = seg[_ROWS] = seg[_VALUES] = 0
        seg[_FRAME_BASE] = page.frames
        seg[_VALUE_BASE] = page.values
        seg[_CLOSED] = SegmentEnd.OPEN
        seg[SegmentField.STARTED_NS] = now
        seg[_GENERATION] = generation + 2
        self._segment = page.segment = number
        page.held += held
        page.segments += 1
        self._seg = seg
        self._frames_at = at + layout.FRAMES_AT
        self._rows_at = at + layout.ROWS_AT
        self._values_at = at + layout.VALUES_AT
        self.fields[_SEGMENT] = number
        self.page = page
        self.cursor[0] = at  # a page is open from here on

    def close(self) -> None:
        """Unmap. The file stays for its readers; whoever made its folder removes it."""
        if self.memory.closed:
            return
        self.page = None
        self.cursor[0] = -1
        self.fields.release()
        self.groups.release()
        self._seg.release()
        self.view.release()
        with suppress(BufferError):  # a device may still write there
            self.memory.close()
