"""The bytes of a recorder file.

    header    4096 bytes   512 integers of 8 bytes: fixed facts, then where the rank is (`HeadField`); from ANOMALY_AT
                           on the rank's first anomaly: length, crc32, msgpack
             20480 bytes   what it does in its process groups: see group_table.py
              4096 bytes   how long the parts of its last steps took: see `read_steps`
    log       LOG_BYTES    definitions and events, append only: length, crc32, msgpack, padded to 8
    segments  n x 16384    a ring; a batch (page) is a run of segments, the oldest are overwritten

A segment is a header of 32 integers (`SegmentField`), then fixed tables of frames, rows and values. Its GENERATION is
odd while it is being recycled, so a reader compares it before and after its copy.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

MAGIC = 0x31_48_43_54_41_57_55_47  # b"GUWATCH1" read as a little-endian integer
VERSION = 5
EARLIER_VERSION = 4
"""Its table of process groups is smaller (`EARLIER_GROUPS`)."""
UNSEALED_VERSION = 3
"""Likewise; and its codes are not sealed, and its header has no CHECK."""

FIXED_BYTES = 4096
GROUPS_AT = FIXED_BYTES
GROUPS = 32
GROUP_BYTES = 640
EARLIER_GROUPS, EARLIER_GROUP_BYTES = 16, 512
STEPS_AT = GROUPS_AT + GROUPS * GROUP_BYTES
STEPS = 64
STEP_BYTES = 64
HEADER_BYTES = STEPS_AT + STEPS * STEP_BYTES
LOG_BYTES = 2 << 20
SEGMENT_BYTES = 16384
SEGMENTS = 256

ANOMALY_AT = 1024
"""Where the header holds the rank's first anomaly: it is there even if the log is full."""
ANOMALY_BYTES = FIXED_BYTES - ANOMALY_AT

SEGMENT_HEADER_BYTES = 256
FRAMES_PER_SEGMENT = 128
ROWS_PER_SEGMENT = 384
VALUES_PER_SEGMENT = 240

FRAME = struct.Struct("<IIhBBqIII")
"""module, parent module, depth, phase, collectives during the call, seq, first row in the segment, rows, index"""
ROW = struct.Struct("<IIIBBH")
"""slot, value index in the page, shape, dtype code, kind, mark"""
VALUE = struct.Struct("<qqq")
"""low, high, meta: see core/values.py"""
ENTRY = struct.Struct("<II")
"""length and crc32 of a log entry"""

FRAMES_AT = SEGMENT_HEADER_BYTES
ROWS_AT = FRAMES_AT + FRAMES_PER_SEGMENT * FRAME.size
VALUES_AT = ROWS_AT + ROWS_PER_SEGMENT * ROW.size
assert VALUES_AT + VALUES_PER_SEGMENT * VALUE.size <= SEGMENT_BYTES
assert VALUES_AT % 8 == 0

NOTHING = 0xFFFF_FFFF
"""No parent, no value, no shape."""


def seal(code: int) -> int:
    """A small number as the header holds it: other bytes than these are no code, so damage is seen as damage."""
    return code * 0x01010101 ^ 0x5A3C6910


def unseal(number: int) -> int:
    """The code; -1 where there is none."""
    code = (number ^ 0x5A3C6910) & 0xFF
    return code if code <= _MOST_CODE and seal(code) == number else -1


_MOST_CODE = 31


def check_of(fields: Sequence[int]) -> int:
    """What CHECK says of the integers between MAGIC and itself."""
    return zlib.crc32(struct.pack(f"<{HeadField.CHECK - 1}q", *fields[HeadField.VERSION : HeadField.CHECK]))


class HeadField(IntEnum):
    """The integers of the header, by position. RankState (core/wire/beat.py) has most by the same name."""

    MAGIC = 0
    VERSION = 1
    RANK = 2
    LOCAL_RANK = 3
    WORLD_SIZE = 4
    ATTEMPT = 5
    PID = 6
    STARTED_NS = 7
    LOG_BYTES = 8
    SEGMENTS = 9
    CHECK = 10
    """See `check_of`."""
    # from here on the worker changes them as it goes
    PHASE = 16
    STEP = 17
    BATCH = 18
    PAGE = 19
    ROOT = 20
    MODULE = 21
    SEQ = 22
    MOVED_NS = 23
    LOG_END = 24
    RECORDS_LOST = 25
    SEGMENT = 26
    ROWS_INTERRUPTED = 27
    ROWS_LOST = 28
    ABORT = 29
    """The exit code (sealed) of a job that the rank ends itself; sealed 0: none."""
    IGNORED = 30
    SCALER_SKIPS = 31
    WARNED = 32
    BATCHES_SKIPPED = 33
    ANOMALY = 34
    HOOKS = 35
    ABSORBED = 36
    GROUPS_NOT_SHOWN = 37
    WAITED_NS = 38
    """How long it has waited, in calls of Python, for what other ranks do."""
    STEPS_TIMED = 39
    """Steps so far whose parts were timed."""
    FAULTS = 40
    """All of them, also those that the log has no room for."""
    NAMES_LOST = 41
    """The frames that they name are judged all the same."""
    CALLS_LEFT_OUT = 42
    LEFT_OUT_PAGE = 43
    HOOKS_GONE = 44
    """Each time they were put back."""
    GONE_PAGE = 45
    LEFT = 46
    """Sealed 1 or 0."""
    PASSED_UNSEEN = 47
    """Sealed 1 or 0; 1 also where not all of them are inspected, as in a captured graph."""
    UNSEEN_CHILD = 48
    """The child writes it."""
    CALLING_CHILD = 49
    """As above."""
    GROUP_TIMEOUT_MS = 50
    """Of its default process group: it may wait there before a slot of the table shows it. 0: not known. The sign is as
    in the table."""
    FORECASTS = 51
    """How many its agent has made of its outputs. The agent writes it (told_forecasts.py)."""
    HAS_FRAMES = 52
    """1 once a page has a frame of something other than a loss."""


class SegmentField(IntEnum):
    """The integers of a segment's header, by position."""

    GENERATION = 0
    PAGE = 1
    ROOT = 2
    BATCH = 3
    STEP = 4
    INDEX = 5
    FRAMES = 6
    ROWS = 7
    VALUES = 8
    FRAME_BASE = 9
    VALUE_BASE = 10
    CLOSED = 11
    STARTED_NS = 12


class SegmentEnd(IntEnum):
    """How a segment ended."""

    OPEN = 0
    CONTINUED = 1
    PAGE_END = 2


class RankPhase(IntEnum):
    """What a rank is doing, in the header's PHASE."""

    STARTING = seal(0)
    PREFLIGHT = seal(1)
    SCRIPT = seal(2)
    FORWARD = seal(3)
    FINISHED = seal(4)
    RAISED = seal(5)
    UNWATCHED = seal(6)
    BACKWARD = seal(7)
    OPTIMIZER = seal(8)


class AnomalyFlag(IntEnum):
    """What the header's ANOMALY says."""

    NONE = seal(0)
    SEEN = seal(1)
    """Which one was too long to write down, or the rank died while it did."""
    WRITTEN = seal(2)


class HooksState(IntEnum):
    """Whether the rank's modules are watched, in the header's HOOKS."""

    NONE = seal(0)
    """torch has not been imported."""
    ATTACHED = seal(1)
    FAILED = seal(2)
    DETACHED = seal(3)
    """Too many errors of gpuwatch itself: the hooks were removed."""


SEALED: dict[HeadField, frozenset[int]] = {
    HeadField.PHASE: frozenset(RankPhase),
    HeadField.ANOMALY: frozenset(AnomalyFlag),
    HeadField.HOOKS: frozenset(HooksState),
    HeadField.ABORT: frozenset(map(seal, range(_MOST_CODE + 1))),
    HeadField.LEFT: frozenset({seal(0), seal(1)}),
    HeadField.PASSED_UNSEEN: frozenset({seal(0), seal(1)}),
}
"""What decides, and all that it can be."""


def file_bytes(log_bytes: int = LOG_BYTES, segments: int = SEGMENTS) -> int:
    """Size of a recorder file."""
    return HEADER_BYTES + log_bytes + segments * SEGMENT_BYTES


def file_name(rank: int, attempt: int) -> str:
    """Name of the recorder file of a rank within its node's folder; or of a process that is none (identity.py)."""
    if rank < 0:
        return f"lone-{-rank}.recorder"
    return f"rank-{rank:05d}.attempt-{attempt:03d}.recorder"


# How long the parts of a rank's last steps took: a ring of `STEPS` entries of `STEP_BYTES`.
#
# An entry is the count of timed steps (1 for the first one), the step, then the nanoseconds of each part (`PARTS`), and
# the count once more. It is whole if both counts are equal. The rank writes in place; any bytes are read without harm.

PARTS = ("outside", "forward", "backward", "waiting", "optimizer")
"""`outside`: from the end of a step to the next forward: data loading, evaluation, checkpoints. `waiting`: for other
ranks, as far as the host sees it. It is in no other part."""
WAITING = PARTS.index("waiting")
STEP_ENTRY = struct.Struct("<8q")
assert STEP_ENTRY.size == STEP_BYTES == 8 * (3 + len(PARTS))


class TimedStep(NamedTuple):
    """One step: its number, and the nanoseconds of each of `PARTS`."""

    number: int
    parts: tuple[int, ...]


def read_steps(data: bytes, after: int) -> list[tuple[int, TimedStep]]:
    """(count, step) of the entries that were written after the first `after` ones, in their order."""
    found = []
    for position in range(STEPS):
        count, number, *parts, again = STEP_ENTRY.unpack_from(data, position * STEP_BYTES)
        if count == again > after and number >= 0 and min(parts) >= 0:
            found.append((count, TimedStep(number, tuple(parts))))
    return sorted(found)
