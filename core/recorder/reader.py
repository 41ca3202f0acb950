"""The node agent's side of a recorder: reads while the worker writes, and after it has died."""

from __future__ import annotations

import mmap
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..messages import PageMessage, RankState, Segment
from ..records import Definition, LogEntry, ModuleDef, RootDef, ShapeDef, SlotDef, WorkerEvent
from . import layout
from .layout import Closed, Field, RankPhase, SegmentField

_DEFINITIONS = (RootDef, ModuleDef, SlotDef, ShapeDef)


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
    """One recorder file, open for reading. Raises NotReady while its writer has not finished making it."""

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
        self._segments = self._fields[Field.SEGMENTS]
        self._segments_at = self._log_at + self._fields[Field.LOG_BYTES]
        self._log_read = 0
        self._decoder: msgspec.msgpack.Decoder[LogEntry] = msgspec.msgpack.Decoder(LogEntry)
        self.rank = self._fields[Field.RANK]
        self.local_rank = self._fields[Field.LOCAL_RANK]
        self.attempt = self._fields[Field.ATTEMPT]
        self.pid = self._fields[Field.PID]
        self.roots: dict[int, RootDef] = {}
        self.modules: dict[int, ModuleDef] = {}
        self.damaged = 0
        """Log entries that could not be read: the writer died in the middle of one, or is of a later version."""

    def __getitem__(self, field: Field) -> int:
        return self._fields[field]

    # -- the log ------------------------------------------------------------------------------------------------

    def new_entries(self) -> tuple[list[Definition], list[WorkerEvent]]:
        """What was appended to the log since the last call."""
        definitions: list[Definition] = []
        events: list[WorkerEvent] = []
        end = self._fields[Field.LOG_END]
        while self._log_read < end:
            at = self._log_at + self._log_read
            size, checksum = layout.ENTRY.unpack_from(self._bytes, at)
            start = at + layout.ENTRY.size
            payload = bytes(self._bytes[start : start + size])
            self._log_read += (layout.ENTRY.size + size + 7) & ~7
            if zlib.crc32(payload) != checksum:
                self.damaged += 1
                continue
            try:
                entry = self._decoder.decode(payload)
            except msgspec.DecodeError:  # of a later version
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
            if self._used(head) and self._head(position)[SegmentField.GENERATION] == head[SegmentField.GENERATION]:
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
            if head[SegmentField.PAGE] != number or not self._used(head):
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

    @staticmethod
    def _used(head: list[int]) -> bool:
        generation = head[SegmentField.GENERATION]
        return generation > 0 and generation % 2 == 0

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
