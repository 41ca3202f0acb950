"""The node agent's side of a recorder: reads while the worker writes, and after it has died."""

from __future__ import annotations

import os
import stat
import struct
import time
import weakref
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..events.alarms import Anomaly
from ..events.definitions import Definition, ModuleDef, RootDef
from ..events.log_entries import LogEntry, WorkerEvent
from ..events.rank_standing import GroupState, HeardSignal
from ..guest.own_files import OwnDescriptor
from ..signal_errors import from_outside
from ..wire.beat import RankState
from ..wire.messages import PageMessage, PageSegment
from . import layout
from .group_table import progress_of, read_groups, widened
from .header_state import SEEN, is_garbage, state_of
from .heard_signals import HEARD_AT, HEARD_BYTES, read_heard
from .layout import AnomalyFlag, HeadField, SegmentEnd, SegmentField, TimedStep, read_steps
from .log_stretch import LogStretch

_NOT_AN_ENTRY = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_SEARCH_BYTES = 32 << 20
"""The most bytes that are checked to find the next whole entry behind a damaged one."""
_READS = 4
"""How often at most a header is read that says what none says."""
_VERSIONS = (layout.UNSEALED_VERSION, layout.EARLIER_VERSION, layout.VERSION)
_EARLIER_BYTES = layout.EARLIER_GROUPS * layout.EARLIER_GROUP_BYTES
_INTEGER = struct.Struct("<q")
_FIELDS = struct.Struct(f"<{max(HeadField) + 1}q")
_SEGMENT_FIELDS = struct.Struct(f"<{len(SegmentField)}q")


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


class CutShort(OSError):
    """The file has become shorter than it was."""


class RecorderReader:
    """One recorder file, open for reading. Raises NotReady while its writer has not finished making it.

    The file may hold any bytes: the reader returns whole entries, and counts and skips damaged ones. It reads the file
    and does not map it, because an access behind the end of a truncated mapping kills the process. If the file was
    truncated, a read raises CutShort; if the disk fails, another OSError.

    With `even_damaged` the rest is read also where the fixed numbers of the head are damaged (`head_is_damaged`): the
    log, the pages and the codes that decide have checks of their own.
    """

    def __init__(self, path: Path, *, even_damaged: bool = False) -> None:
        self.path = path
        self._even_damaged = even_damaged
        self._is_unsealed = False
        self._groups_bytes = layout.GROUPS * layout.GROUP_BYTES
        self._file = OwnDescriptor(path, os.O_RDONLY | os.O_NONBLOCK)
        self._fd = self._file.number
        self.close = weakref.finalize(self, self._file.close)
        """Lets go of the file."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size < layout.FIXED_BYTES:
            raise NotReady(f"{self.path} has {found.st_size} bytes")
        header = self.header()
        if header[HeadField.MAGIC] != layout.MAGIC or header[HeadField.VERSION] not in _VERSIONS:
            raise NotReady(f"{self.path} is not a recorder of version {layout.VERSION}")
        self._is_unsealed = header[HeadField.VERSION] == layout.UNSEALED_VERSION
        if header[HeadField.VERSION] != layout.VERSION:
            self._groups_bytes = _EARLIER_BYTES
        self._steps_at = layout.GROUPS_AT + self._groups_bytes
        self._log_at = self._steps_at + layout.STEPS * layout.STEP_BYTES
        self.head_is_damaged = not self._is_unsealed and header[HeadField.CHECK] != layout.check_of(header)
        if self.head_is_damaged and not self._even_damaged:
            raise NotReady(f"{self.path} has a damaged header, or one that is being written")
        self._log_bytes, self.segments = self._sizes(header, found.st_size)
        self._segments_at = self._log_at + self._log_bytes
        self._log_read = 0
        self._searched = 0
        self._decoder: msgspec.msgpack.Decoder[LogEntry] = msgspec.msgpack.Decoder(LogEntry)
        self.rank = header[HeadField.RANK]
        self.local_rank = header[HeadField.LOCAL_RANK]
        self.attempt = header[HeadField.ATTEMPT]
        self.pid = header[HeadField.PID]
        self.roots: dict[int, RootDef] = {}
        self.modules: dict[int, ModuleDef] = {}
        self.damaged = 0
        """Log entries that could not be read: the writer died in the middle of one, or is of a later version."""

    def _sizes(self, header: tuple[int, ...], size: int) -> tuple[int, int]:
        """(bytes of the log, segments), as the header says, or as the file's size has it where that is damaged."""
        log_bytes, segments = header[HeadField.LOG_BYTES], header[HeadField.SEGMENTS]
        size += layout.HEADER_BYTES - self._log_at
        if log_bytes >= 0 and segments >= 0 and layout.file_bytes(log_bytes, segments) == size:
            return log_bytes, segments
        if size == layout.file_bytes():
            return layout.LOG_BYTES, layout.SEGMENTS
        raise NotReady(f"{self.path} has {size} bytes, which are not those of a recorder")

    def _read(self, at: int, size: int) -> bytes:
        data = os.pread(self._fd, size, at)
        if len(data) < size:
            raise CutShort(f"it was cut short at {at + len(data)} bytes")
        return data

    def header(self) -> tuple[int, ...]:
        """The integers of the header (`HeadField`), as they are now. If one is being written, half of it may be old."""
        fields = _FIELDS.unpack(self._read(0, _FIELDS.size))
        if self._is_unsealed:  # as this version has them
            return tuple(layout.seal(number) if at in layout.SEALED else number for at, number in enumerate(fields))
        return fields

    def __getitem__(self, field: HeadField) -> int:
        (number,) = _INTEGER.unpack(self._read(8 * field, 8))
        return layout.seal(number) if self._is_unsealed and field in layout.SEALED else int(number)

    # -- the log ------------------------------------------------------------------------------------------------

    def _log_end(self) -> int:
        """Read twice: a copy of a number that is being written may hold half of the new one."""
        end = self[HeadField.LOG_END]
        while (again := self[HeadField.LOG_END]) != end:
            end = again
        return end

    def has_more(self, header: tuple[int, ...]) -> bool:
        """Whether something was appended to the log since the last call of `new_entries`."""
        return header[HeadField.LOG_END] >= self._log_read + layout.ENTRY.size

    def new_entries(self) -> tuple[list[Definition], list[WorkerEvent]]:
        """What was appended to the log since the last call."""
        definitions: list[Definition] = []
        events: list[WorkerEvent] = []
        end = min(self._log_end(), self._log_bytes)
        if self._log_read + layout.ENTRY.size > end:
            return definitions, events
        log = LogStretch(self._read(self._log_at + self._log_read, end - self._log_read), self._log_read)
        while self._log_read + layout.ENTRY.size <= end:
            payload = log.entry(self._log_read)
            if payload is None:
                self.damaged += 1
                self._log_read, searched = log.next_entry(self._log_read + 8, _SEARCH_BYTES - self._searched)
                self._searched += searched
                continue
            self._log_read += (layout.ENTRY.size + len(payload) + 7) & ~7
            try:
                entry = self._decoder.decode(payload)
            except _NOT_AN_ENTRY as error:  # of a later version
                if from_outside(error):
                    raise
                self.damaged += 1
                continue
            if not isinstance(entry, Definition):
                events.append(entry)
                continue
            definitions.append(entry)
            if isinstance(entry, RootDef):
                self.roots[entry.id] = entry
            elif isinstance(entry, ModuleDef):
                self.modules[entry.id] = entry
        return definitions, events

    def first_anomaly(self) -> Anomaly | None:
        """What the rank has written into its header; None if there is nothing, or nothing whole (`overflow_seen`)."""
        if self[HeadField.ANOMALY] != AnomalyFlag.WRITTEN:
            return None
        payload = LogStretch(self._read(0, layout.FIXED_BYTES), 0).entry(layout.ANOMALY_AT)
        try:
            entry = self._decoder.decode(payload) if payload is not None else None
        except _NOT_AN_ENTRY as error:
            if from_outside(error):
                raise
            return None
        return entry if isinstance(entry, Anomaly) else None

    @property
    def overflow_seen(self) -> bool:
        """Whether the rank says that it has seen an anomaly, readable or not."""
        return self[HeadField.ANOMALY] in SEEN

    @property
    def abort(self) -> int:
        """The exit code of a job that the rank ends itself; 0: it does not; -1: that is damaged."""
        return layout.unseal(self[HeadField.ABORT])

    # -- where the rank is --------------------------------------------------------------------------------------

    def movement(self) -> tuple[int, ...]:
        """Changes whenever the rank has recorded anything, or has entered another module or phase."""
        fields = self.header()
        segment = fields[HeadField.SEGMENT]
        head = self._head(segment % self.segments) if segment >= 0 and self.segments else []
        written = (head[SegmentField.FRAMES], head[SegmentField.ROWS]) if head else ()
        return (*(fields[field] for field in _MOVING), *written, *progress_of(self._groups()))

    def groups(self) -> list[GroupState]:
        """What the rank does in its process groups."""
        ahead_ns = min(-time.monotonic_ns() + time.time_ns() for _ in range(_READS))  # the least delay between the two
        return read_groups(self._groups(), time.monotonic_ns(), ahead_ns)

    def heard(self) -> list[HeardSignal]:
        """The signals that have reached handlers of the script."""
        return read_heard(self._read(HEARD_AT, HEARD_BYTES))

    def steps(self, after: int) -> list[tuple[int, TimedStep]]:
        """(count, step) of the timed steps after the first `after` ones, as far as the ring still holds them."""
        return read_steps(self._read(self._steps_at, layout.STEPS * layout.STEP_BYTES), after)

    def _groups(self) -> bytes:
        table = self._read(layout.GROUPS_AT, self._groups_bytes)
        return table if self._log_at == layout.HEADER_BYTES else widened(table)

    def state(self) -> RankState:
        """A snapshot for a beat."""
        for _ in range(_READS):  # where it says what no writer writes, a number may be half old
            fields = self.header()
            if not is_garbage(fields):
                break
        return state_of(fields, self.rank, self.attempt, self.modules.get(fields[HeadField.MODULE]), self.damaged)

    # -- pages --------------------------------------------------------------------------------------------------

    def begun_after(self, segment: int) -> list[tuple[int, int]]:
        """(segment, batch) of the segments begun after `segment` that the ring still holds.

        Segments are counted from the run's beginning. Reading these few is quicker than reading the whole ring.
        """
        last = self[HeadField.SEGMENT]
        first = max(segment + 1, last - self.segments + 1)
        return [(number, self._head(number % self.segments)[SegmentField.BATCH]) for number in range(first, last + 1)]

    def held(self) -> list[HeldPage]:
        """What the ring holds something of, in the order in which the pages were begun. Copies no table."""
        last: dict[int, list[int]] = {}
        for position in range(self.segments):
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
                complete=head[SegmentField.CLOSED] == SegmentEnd.PAGE_END,
                frames=head[SegmentField.FRAME_BASE] + head[SegmentField.FRAMES],
                values=head[SegmentField.VALUE_BASE] + head[SegmentField.VALUES],
            )
            for number, head in sorted(last.items())
        ]

    def page(self, number: int) -> PageMessage | None:
        """What the ring still holds of page `number`; None if nothing."""
        found: dict[int, tuple[list[int], PageSegment]] = {}
        for position in range(self.segments):
            head = self._head(position)
            if head[SegmentField.PAGE] == number and _is_whole(head) and (segment := self._copy(position, head)):
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
            complete=last[SegmentField.CLOSED] == SegmentEnd.PAGE_END,
            segments=[found[index][1] for index in order],
        )

    def _head(self, position: int) -> list[int]:
        at = self._segments_at + position * layout.SEGMENT_BYTES
        return list(_SEGMENT_FIELDS.unpack(self._read(at, _SEGMENT_FIELDS.size)))

    def _copy(self, position: int, head: list[int]) -> PageSegment | None:
        at = self._segments_at + position * layout.SEGMENT_BYTES
        # Frames last were written, so they are read first: what they refer to is then there.
        segment = PageSegment(
            index=head[SegmentField.INDEX],
            frame_base=head[SegmentField.FRAME_BASE],
            value_base=head[SegmentField.VALUE_BASE],
            frames=self._read(at + layout.FRAMES_AT, head[SegmentField.FRAMES] * layout.FRAME.size),
            rows=self._read(at + layout.ROWS_AT, head[SegmentField.ROWS] * layout.ROW.size),
            values=self._read(at + layout.VALUES_AT, head[SegmentField.VALUES] * layout.VALUE.size),
        )
        return segment if self._head(position)[SegmentField.GENERATION] == head[SegmentField.GENERATION] else None


_MOVING = (
    HeadField.PHASE,
    HeadField.STEP,
    HeadField.BATCH,
    HeadField.PAGE,
    HeadField.MODULE,
    HeadField.SEQ,
    HeadField.MOVED_NS,
    HeadField.LOG_END,
    HeadField.SEGMENT,
    HeadField.BATCHES_SKIPPED,
)
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
