"""A rank's recorder as its worker makes it: the file, its header, and the log of names and events."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

import msgspec

from ..events.alarms import Anomaly
from ..events.definitions import Definition
from ..events.log_entries import LogEntry
from ..events.own_limits import OwnFault, costs_frames
from ..guest.own_files import RecorderMap
from ..text import carried, plain_text
from . import layout
from .layout import AnomalyFlag, HeadField, HooksState, RankPhase
from .pages import NameTable

_EVENT_RESERVE = 256 << 10
"""Bytes of the log that names may not take, so that an event always finds room."""
_LOG_END = int(HeadField.LOG_END)


class RecorderFile:
    """The part of a RecorderWriter that makes the file, and appends names and events.

    What is written here must not be torn by a signal's handler: see writer.py.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        local_rank: int,
        world_size: int,
        attempt: int,
        log_bytes: int,
        segments: int,
    ) -> None:
        self.path = path
        size = layout.file_bytes(log_bytes, segments)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Without this, a full /dev/shm kills the training with SIGBUS at the first touch of a missing page.
            os.posix_fallocate(fd, 0, size)
            self.memory = RecorderMap(fd, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self.view = memoryview(self.memory)
        """The whole file."""
        self.fields = self.view[: layout.FIXED_BYTES].cast("q")
        self._encoder = msgspec.msgpack.Encoder()
        self._log_at = layout.HEADER_BYTES
        self._log_bytes = log_bytes
        self._log_end = 0
        self.names = NameTable()
        """The definitions so far, for whoever reads pages in this process."""

        first = {
            HeadField.VERSION: layout.VERSION,
            HeadField.PID: os.getpid(),
            HeadField.STARTED_NS: time.time_ns(),
            HeadField.LOG_BYTES: log_bytes,
            HeadField.SEGMENTS: segments,
            HeadField.PHASE: RankPhase.STARTING,
            HeadField.ANOMALY: AnomalyFlag.NONE,
            HeadField.HOOKS: HooksState.NONE,
            **dict.fromkeys((HeadField.ABORT, HeadField.LEFT, HeadField.PASSED_UNSEEN), layout.seal(0)),
            **dict.fromkeys((HeadField.BATCH, HeadField.PAGE, HeadField.ROOT), -1),
            **dict.fromkeys((HeadField.MODULE, HeadField.SEQ, HeadField.SEGMENT), -1),
            HeadField.MOVED_NS: time.monotonic_ns(),
        }
        for at, value in first.items():
            self.fields[at] = value
        self.identify(rank, local_rank, world_size, attempt)
        self.fields[HeadField.MAGIC] = layout.MAGIC  # last: a reader waits for it

    def identify(self, rank: int, local_rank: int, world_size: int, attempt: int) -> None:
        """Say whose the file is. A reader that comes in between finds it not ready."""
        fields = self.fields
        fields[HeadField.CHECK] = -1
        fields[HeadField.RANK], fields[HeadField.LOCAL_RANK] = rank, local_rank
        fields[HeadField.WORLD_SIZE], fields[HeadField.ATTEMPT] = world_size, attempt
        fields[HeadField.CHECK] = layout.check_of(fields[: HeadField.CHECK].tolist())

    def append(self, record: LogEntry, *, name: bool = False) -> bool:
        """Append a definition (`name=True`) or an event; False, and counted, when the log is full.

        The first anomaly is written into the header as well, see `note_first_anomaly`, and a fault is counted there.
        """
        if isinstance(record, Definition):
            self.names.add((record,))
        elif isinstance(record, Anomaly):
            self.note_first_anomaly(record)
        elif isinstance(record, OwnFault):
            self.count_fault(record.part)
        payload = self._encode(record)
        room = self._log_bytes - (_EVENT_RESERVE if name and self._log_bytes > 2 * _EVENT_RESERVE else 0)
        if payload is None or not self._append_entry(_entry_of(payload), room):
            self.fields[HeadField.RECORDS_LOST] += 1
            self.fields[HeadField.NAMES_LOST] += payload is not None and isinstance(record, Definition)
            return False
        return True

    def _append_entry(self, entry: bytes, room: int) -> bool:
        """False if the log has no room for it."""
        size = (len(entry) + 7) & ~7
        while True:
            end = self._log_end
            if end + size > room:
                return False
            place = slice(self._log_at + end, self._log_at + end + len(entry))
            if self._log_end == end:  # no other entry has come meanwhile: without a call from here on
                self.view[place] = entry
                self._log_end = self.fields[_LOG_END] = end + size
                return True

    def count_fault(self, part: str) -> None:
        """Count an error of gpuwatch itself, where no log can be full. `append` calls it for every Fault."""
        if costs_frames(part):
            self.fields[HeadField.FAULTS] += 1

    def note_first_anomaly(self, anomaly: Anomaly) -> None:
        """Write the rank's first anomaly into the header, in place: no log that is full, and no reader that is gone,
        makes it unseen. A later one changes nothing. `append` calls it for every Anomaly."""
        fields = self.fields
        if fields[HeadField.ANOMALY] != AnomalyFlag.NONE:
            return
        fields[HeadField.ANOMALY] = AnomalyFlag.SEEN
        room = layout.ANOMALY_BYTES - layout.ENTRY.size
        try:
            payload = self._encode(anomaly)
            if payload is None or len(payload) > room:
                payload = self._encode(_shortened(anomaly))
        except UnicodeEncodeError:
            return
        if payload is None or len(payload) > room:
            return
        entry = _entry_of(payload)
        self.view[layout.ANOMALY_AT : layout.ANOMALY_AT + len(entry)] = entry
        fields[HeadField.ANOMALY] = AnomalyFlag.WRITTEN  # last: a reader waits for it

    def _encode(self, record: LogEntry) -> bytes | None:
        """Bytes of a record; None for one that cannot be written at all (an integer beyond 64 bits)."""
        try:
            return self._encoder.encode(record)
        except UnicodeEncodeError:  # a file name that is no UTF-8, in a message
            return self._encoder.encode(carried(record, plain_text))
        except OverflowError:
            return None


def _entry_of(payload: bytes) -> bytes:
    return layout.ENTRY.pack(len(payload), zlib.crc32(payload)) + payload


def _shortened(anomaly: Anomaly) -> Anomaly:
    """A copy whose texts fit into the header."""
    where = msgspec.structs.replace(anomaly.where, root=anomaly.where.root[:100], clock={})
    texts = {name: value[:150] for name, value in msgspec.structs.asdict(anomaly).items() if isinstance(value, str)}
    return msgspec.structs.replace(anomaly, where=where, shape=None, **texts)
