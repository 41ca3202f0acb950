"""The worker's side of a recorder: every call is a few stores into mapped memory, none waits."""

from __future__ import annotations

import mmap
import os
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..records import LogEntry
from . import layout
from .layout import Closed, Field, RankPhase, SegmentField

_EVENT_RESERVE = 256 << 10
"""Bytes of the log that names may not take, so that an event always finds room."""

RowTuple = tuple[int, int, int, int, int]
"""slot, value, shape, dtype code, kind"""


class RecorderWriter:
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
        self.path = path
        size = layout.file_bytes(log_bytes, segments)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Without this, a full /dev/shm kills the training with SIGBUS at the first touch of a missing page.
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self._bytes = memoryview(self._map)
        self.fields = self._bytes[: layout.HEADER_BYTES].cast("q")
        self._encoder = msgspec.msgpack.Encoder()
        self._log_at = layout.HEADER_BYTES
        self._log_bytes = log_bytes
        self._log_end = 0
        self._segments_at = self._log_at + log_bytes
        self._segments = segments
        self._segment = -1
        self._pages = -1
        self._frames = 0
        self._page_open = False
        self.on_segment_end: Callable[[int, int, bool], None] | None = None
        """Called with (offset of its values in the file, page, whether the page ends) when a segment is done."""

        fields = self.fields
        for field, value in (
            (Field.VERSION, layout.VERSION),
            (Field.RANK, rank),
            (Field.LOCAL_RANK, local_rank),
            (Field.WORLD_SIZE, world_size),
            (Field.ATTEMPT, attempt),
            (Field.PID, os.getpid()),
            (Field.STARTED_NS, time.time_ns()),
            (Field.LOG_BYTES, log_bytes),
            (Field.SEGMENTS, segments),
            (Field.PHASE, RankPhase.STARTING),
            (Field.BATCH, -1),
            (Field.PAGE, -1),
            (Field.ROOT, -1),
            (Field.MODULE, -1),
            (Field.SEQ, -1),
            (Field.SEGMENT, -1),
            (Field.MOVED_NS, time.monotonic_ns()),
        ):
            fields[field] = value
        fields[Field.MAGIC] = layout.MAGIC  # last: a reader waits for it

    @property
    def memory(self) -> mmap.mmap:
        """The mapped file."""
        return self._map

    @property
    def frames(self) -> int:
        """Frames in the page so far."""
        return self._frames

    @property
    def value_position(self) -> int:
        """Position of the last value in its segment."""
        return self._values_used - 1

    # -- the log ------------------------------------------------------------------------------------------------

    def append(self, record: LogEntry, *, name: bool = False) -> bool:
        """Append a definition (`name=True`) or an event; False, and counted, when the log is full."""
        payload = self._encode(record)
        if payload is None:
            self.fields[Field.RECORDS_LOST] += 1
            return False
        size = (layout.ENTRY.size + len(payload) + 7) & ~7
        room = self._log_bytes - (_EVENT_RESERVE if name and self._log_bytes > 2 * _EVENT_RESERVE else 0)
        if self._log_end + size > room:
            self.fields[Field.RECORDS_LOST] += 1
            return False
        at = self._log_at + self._log_end
        layout.ENTRY.pack_into(self._bytes, at, len(payload), zlib.crc32(payload))
        start = at + layout.ENTRY.size
        self._bytes[start : start + len(payload)] = payload
        self._log_end += size
        self.fields[Field.LOG_END] = self._log_end
        return True

    def _encode(self, record: LogEntry) -> bytes | None:
        """Bytes of a record; None for one that cannot be written at all (an integer beyond 64 bits)."""
        try:
            return self._encoder.encode(record)
        except UnicodeEncodeError:  # a file name that is no UTF-8, in a message
            return self._encoder.encode(_with_plain_text(record))
        except OverflowError:
            return None

    # -- pages --------------------------------------------------------------------------------------------------

    def begin_page(self, root: int, batch: int, step: int) -> int:
        """Start a page; returns its number, counted from 0 over all roots of this rank."""
        if self._page_open:
            self.end_page()
        self._pages += 1
        self._frames = 0
        self._values = 0
        self._index = -1
        self._head = (root, batch, step)
        self._page_open = True
        self._next_segment()
        fields = self.fields
        fields[Field.STEP] = step
        fields[Field.BATCH] = batch
        fields[Field.ROOT] = root
        fields[Field.PAGE] = self._pages
        fields[Field.MOVED_NS] = time.monotonic_ns()
        return self._pages

    def value(self, low: int, high: int, meta: int) -> int:
        """Store the numbers of one tensor; returns its index in the page."""
        if self._values_used == layout.VALUES_PER_SEGMENT:
            self._continue_segment()
        layout.VALUE.pack_into(self._bytes, self._values_at + self._values_used * 24, low, high, meta)
        self._values_used += 1
        self._seg[SegmentField.VALUES] = self._values_used
        index = self._values
        self._values += 1
        return index

    def frame(self, module: int, parent: int, depth: int, phase: int, seq: int, rows: Sequence[RowTuple]) -> int:
        """Store a finished module call; returns its index in the page. Rows beyond a segment's table are counted."""
        count = len(rows)
        if count > layout.ROWS_PER_SEGMENT:
            self.fields[Field.ROWS_LOST] += count - layout.ROWS_PER_SEGMENT
            count = layout.ROWS_PER_SEGMENT
            rows = rows[:count]
        if self._frames_used == layout.FRAMES_PER_SEGMENT or self._rows_used + count > layout.ROWS_PER_SEGMENT:
            self._continue_segment()
        at = self._rows_at + self._rows_used * 16
        pack_row, data = layout.ROW.pack_into, self._bytes
        for slot, value, shape, dtype, kind in rows:
            pack_row(data, at, slot, value, shape, dtype, kind, 0)
            at += 16
        index = self._frames
        layout.FRAME.pack_into(
            data,
            self._frames_at + self._frames_used * 32,
            module,
            parent,
            min(depth, 32767),
            phase,
            0,
            seq,
            self._rows_used,
            count,
            index,
        )
        self._rows_used += count
        self._frames_used += 1
        self._frames += 1
        seg = self._seg
        seg[SegmentField.ROWS] = self._rows_used
        seg[SegmentField.FRAMES] = self._frames_used
        return index

    def end_page(self) -> None:
        """The batch has ended."""
        if self._page_open:
            self._seg[SegmentField.CLOSED] = Closed.PAGE_END
            self._page_open = False
            self._segment_done(True)
            self.fields[Field.MOVED_NS] = time.monotonic_ns()

    def _continue_segment(self) -> None:
        self._seg[SegmentField.CLOSED] = Closed.CONTINUED
        self._segment_done(False)
        self._next_segment()

    def _segment_done(self, ends_page: bool) -> None:
        if self.on_segment_end is not None:
            self.on_segment_end(self._values_at, self._pages, ends_page)

    def _next_segment(self) -> None:
        self._segment += 1
        self._index += 1
        at = self._segments_at + (self._segment % self._segments) * layout.SEGMENT_BYTES
        seg = self._seg = self._bytes[at : at + layout.SEGMENT_HEADER_BYTES].cast("q")
        generation = seg[SegmentField.GENERATION]
        seg[SegmentField.GENERATION] = generation + 1
        root, batch, step = self._head
        seg[SegmentField.PAGE] = self._pages
        seg[SegmentField.ROOT] = root
        seg[SegmentField.BATCH] = batch
        seg[SegmentField.STEP] = step
        seg[SegmentField.INDEX] = self._index
        seg[SegmentField.FRAMES] = seg[SegmentField.ROWS] = seg[SegmentField.VALUES] = 0
        seg[SegmentField.FRAME_BASE] = self._frames
        seg[SegmentField.VALUE_BASE] = self._values
        seg[SegmentField.CLOSED] = Closed.OPEN
        seg[SegmentField.STARTED_NS] = time.time_ns()
        seg[SegmentField.GENERATION] = generation + 2
        self._frames_at = at + layout.FRAMES_AT
        self._rows_at = at + layout.ROWS_AT
        self._values_at = at + layout.VALUES_AT
        self._frames_used = self._rows_used = self._values_used = 0
        self.fields[Field.SEGMENT] = self._segment

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Unmap. The file stays for its readers; whoever made its folder removes it."""
        if self._map.closed:
            return
        self.fields.release()
        if self._segment >= 0:
            self._seg.release()
        self._bytes.release()
        self._map.close()


def _with_plain_text(record: LogEntry) -> LogEntry:
    """The record with what UTF-8 cannot hold shown as escapes."""
    texts = {
        name: value.encode(errors="backslashreplace").decode()
        for name, value in msgspec.structs.asdict(record).items()
        if isinstance(value, str)
    }
    return msgspec.structs.replace(record, **texts)
