"""The node agent's side of a recorder: reads while the worker writes, and after it has died."""

from __future__ import annotations

import mmap
import time
import zlib
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from ..records import Anomaly, Definition, LogEntry, ModuleDef, RootDef, ShapeDef, SlotDef, WorkerEvent
from ..wire.messages import PageMessage, RankState, Segment
from . import layout
from .layout import Closed, Field, FirstAnomaly, HooksState, RankPhase, SegmentField

_DEFINITIONS = (RootDef, ModuleDef, SlotDef, ShapeDef)
_NOT_AN_ENTRY = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_SEARCH_BYTES = 32 << 20
"""So many bytes are checked at most to find the next whole entry behind a damaged one."""
_MAX_ENTRY = 64 << 10
"""What is longer is not found again behind a damaged entry."""


_HOOKS: dict[int, Literal["none", "attached", "failed"]] = {
    HooksState.ATTACHED: "attached",
    HooksState.FAILED: "failed",
}


class NotReady(Exception):
    """The file is not (yet) a recorder of this version."""


class HeldPage(NamedTuple):
    """A page that the ring holds at least the end of. `frames` and `values` count from its beginning."""

    number: int
    root: int
    batch: int
    complete: bool
    frames: int
    values: int


class RecorderReader:
    """One recorder file, open for reading. Raises NotReady while its writer has not finished making it.

    Any bytes may be in the file: what is whole is read, what is damaged is counted and left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < layout.HEADER_BYTES:
                raise NotReady(f"{path} has {size} bytes")
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self._bytes = memoryview(self._map)
        self._fields = self._bytes[: layout.HEADER_BYTES].cast("q")
        if self._fields[Field.MAGIC] != layout.MAGIC or self._fields[Field.VERSION] != layout.VERSION:
            self.close()
            raise NotReady(f"{path} is not a recorder of version {layout.VERSION}")
        self._log_at = layout.HEADER_BYTES
        self._log_bytes, self._segments = self._sizes(size)
        self._segments_at = self._log_at + self._log_bytes
        self._log_read = 0
        self._searched = 0
        self._decoder: msgspec.msgpack.Decoder[LogEntry] = msgspec.msgpack.Decoder(LogEntry)
        self.rank = self._fields[Field.RANK]
        self.local_rank = self._fields[Field.LOCAL_RANK]
        self.attempt = self._fields[Field.ATTEMPT]
        self.pid = self._fields[Field.PID]
        self.roots: dict[int, RootDef] = {}
        self.modules: dict[int, ModuleDef] = {}
        self.damaged = 0
        """Log entries that could not be read: the writer died in the middle of one, or is of a later version."""

    def _sizes(self, size: int) -> tuple[int, int]:
        """(bytes of the log, segments), as the header says, or as the file's size has it where that is damaged."""
        log_bytes, segments = self._fields[Field.LOG_BYTES], self._fields[Field.SEGMENTS]
        if log_bytes >= 0 and segments >= 0 and layout.file_bytes(log_bytes, segments) == size:
            return log_bytes, segments
        if size == layout.file_bytes():
            return layout.LOG_BYTES, layout.SEGMENTS
        raise NotReady(f"{self.path} has {size} bytes, which are not those of a recorder")

    def __getitem__(self, field: Field) -> int:
        return self._fields[field]

    # -- the log ------------------------------------------------------------------------------------------------

    def new_entries(self) -> tuple[list[Definition], list[WorkerEvent]]:
        """What was appended to the log since the last call."""
        definitions: list[Definition] = []
        events: list[WorkerEvent] = []
        end = min(self._fields[Field.LOG_END], self._log_bytes)
        while self._log_read + layout.ENTRY.size <= end:
            payload = self._entry(self._log_read, end)
            if payload is None:
                self.damaged += 1
                self._log_read = self._next_entry(self._log_read + 8, end)
                continue
            self._log_read += (layout.ENTRY.size + len(payload) + 7) & ~7
            try:
                entry = self._decoder.decode(payload)
            except _NOT_AN_ENTRY:  # of a later version
                self.damaged += 1
                continue
            if isinstance(entry, _DEFINITIONS):
                if isinstance(entry, RootDef):
                    self.roots[entry.id] = entry
                elif isinstance(entry, ModuleDef):
                    self.modules[entry.id] = entry
                definitions.append(entry)
            else:
                events.append(entry)
        return definitions, events

    def _entry(self, position: int, end: int) -> bytes | None:
        """The payload at `position` in the log; None where there is no whole one."""
        size, checksum = layout.ENTRY.unpack_from(self._bytes, self._log_at + position)
        start = position + layout.ENTRY.size
        if not size or start + size > end:
            return None
        payload = bytes(self._bytes[self._log_at + start : self._log_at + start + size])
        return payload if zlib.crc32(payload) == checksum else None

    def _next_entry(self, position: int, end: int) -> int:
        """Where the next whole entry begins; the end of the log if none is found."""
        while position + layout.ENTRY.size <= end and self._searched < _SEARCH_BYTES:
            size, _ = layout.ENTRY.unpack_from(self._bytes, self._log_at + position)
            if 0 < size <= _MAX_ENTRY:
                self._searched += size
                if self._entry(position, end) is not None:
                    return position
            position += 8
        return end

    def first_anomaly(self) -> Anomaly | None:
        """What the rank has written into its header; None if there is nothing, or nothing whole (`overflow_seen`)."""
        if self._fields[Field.ANOMALY] != FirstAnomaly.WRITTEN:
            return None
        size, checksum = layout.ENTRY.unpack_from(self._bytes, layout.ANOMALY_AT)
        start = layout.ANOMALY_AT + layout.ENTRY.size
        payload = bytes(self._bytes[start : min(start + size, layout.HEADER_BYTES)])
        if zlib.crc32(payload) != checksum:
            return None
        try:
            entry = self._decoder.decode(payload)
        except _NOT_AN_ENTRY:
            return None
        return entry if isinstance(entry, Anomaly) else None

    @property
    def overflow_seen(self) -> bool:
        """Whether the rank says that it has seen an anomaly, readable or not."""
        return self._fields[Field.ANOMALY] != FirstAnomaly.NONE

    # -- where the rank is --------------------------------------------------------------------------------------

    @property
    def phase(self) -> RankPhase:
        """What the rank is doing."""
        number = self._fields[Field.PHASE]
        return RankPhase(number) if number in RankPhase._value2member_map_ else RankPhase.STARTING

    def module(self) -> ModuleDef | None:
        """The innermost module that is running, or None between forwards."""
        return self.modules.get(self._fields[Field.MODULE])

    def state(self) -> RankState:
        """A snapshot for a beat."""
        fields = self._fields
        module = self.module()
        return RankState(
            rank=self.rank,
            local_rank=self.local_rank,
            attempt=self.attempt,
            pid=self.pid,
            phase=self.phase.name.lower(),
            step=fields[Field.STEP],
            batch=fields[Field.BATCH],
            seq=fields[Field.SEQ],
            module=module.name if module is not None else None,
            cls=module.cls if module is not None else None,
            frames_lost=fields[Field.FRAMES_LOST],
            rows_lost=fields[Field.ROWS_LOST],
            records_lost=fields[Field.RECORDS_LOST] + self.damaged,
            ignored=fields[Field.IGNORED],
            scaler_skips=fields[Field.SCALER_SKIPS],
            warned=fields[Field.WARNED],
            batches_skipped=fields[Field.BATCHES_SKIPPED],
            age_s=max(0.0, (time.monotonic_ns() - fields[Field.MOVED_NS]) / 1e9),
            world_size=fields[Field.WORLD_SIZE],
            hooks=_HOOKS.get(fields[Field.HOOKS], "none"),
            overflow=self.overflow_seen,
            absorbed=fields[Field.ABSORBED],
        )

    # -- pages --------------------------------------------------------------------------------------------------

    def last_page(self) -> PageMessage | None:
        """The newest page, finished or not."""
        number = self._fields[Field.PAGE]
        return self.page(number) if number >= 0 else None

    def held(self) -> list[HeldPage]:
        """What the ring holds something of, in the order in which the pages were begun. Copies no table."""
        last: dict[int, list[int]] = {}
        for position in range(self._segments):
            head = self._head(position)
            if _is_whole(head) and self._head(position)[SegmentField.GENERATION] == head[SegmentField.GENERATION]:
                known = last.get(head[SegmentField.PAGE])
                if known is None or known[SegmentField.INDEX] < head[SegmentField.INDEX]:
                    last[head[SegmentField.PAGE]] = head
        return [
            HeldPage(
                number=number,
                root=head[SegmentField.ROOT],
                batch=head[SegmentField.BATCH],
                complete=head[SegmentField.CLOSED] == Closed.PAGE_END,
                frames=head[SegmentField.FRAME_BASE] + head[SegmentField.FRAMES],
                values=head[SegmentField.VALUE_BASE] + head[SegmentField.VALUES],
            )
            for number, head in sorted(last.items())
        ]

    def page(self, number: int) -> PageMessage | None:
        """What the ring still holds of page `number`; None if nothing."""
        found: dict[int, tuple[list[int], Segment]] = {}
        for position in range(self._segments):
            head = self._head(position)
            if head[SegmentField.PAGE] != number or not _is_whole(head):
                continue
            segment = self._copy(position, head)
            if segment is not None:
                found[segment.index] = (head, segment)
        if not found:
            return None
        order = sorted(found)
        last = found[order[-1]][0]
        return PageMessage(
            rank=self.rank,
            attempt=self.attempt,
            number=number,
            root=last[SegmentField.ROOT],
            batch=last[SegmentField.BATCH],
            step=last[SegmentField.STEP],
            complete=last[SegmentField.CLOSED] == Closed.PAGE_END,
            segments=[found[index][1] for index in order],
        )

    def _head(self, position: int) -> list[int]:
        at = self._segments_at + position * layout.SEGMENT_BYTES
        return self._bytes[at : at + layout.SEGMENT_HEADER_BYTES].cast("q").tolist()

    def _copy(self, position: int, head: list[int]) -> Segment | None:
        at = self._segments_at + position * layout.SEGMENT_BYTES

        def table(start: int, count: int, size: int) -> bytes:
            return bytes(self._bytes[at + start : at + start + count * size])

        # Frames last were written, so they are read first: what they refer to is then there.
        segment = Segment(
            index=head[SegmentField.INDEX],
            frame_base=head[SegmentField.FRAME_BASE],
            value_base=head[SegmentField.VALUE_BASE],
            frames=table(layout.FRAMES_AT, head[SegmentField.FRAMES], layout.FRAME.size),
            rows=table(layout.ROWS_AT, head[SegmentField.ROWS], layout.ROW.size),
            values=table(layout.VALUES_AT, head[SegmentField.VALUES], layout.VALUE.size),
        )
        return segment if self._head(position)[SegmentField.GENERATION] == head[SegmentField.GENERATION] else None

    def close(self) -> None:
        """Unmap."""
        if not self._map.closed:
            self._fields.release()
            self._bytes.release()
            self._map.close()


_TABLES = (
    (SegmentField.FRAMES, layout.FRAMES_PER_SEGMENT),
    (SegmentField.ROWS, layout.ROWS_PER_SEGMENT),
    (SegmentField.VALUES, layout.VALUES_PER_SEGMENT),
)
_COUNTERS = (SegmentField.PAGE, SegmentField.INDEX, SegmentField.FRAME_BASE, SegmentField.VALUE_BASE)


def _is_whole(head: list[int]) -> bool:
    """Whether a segment is in use, not just being recycled, and its header says what can be."""
    generation = head[SegmentField.GENERATION]
    return (
        generation > 0
        and generation % 2 == 0
        and all(0 <= head[field] <= most for field, most in _TABLES)
        and all(head[field] >= 0 for field in _COUNTERS)
    )
