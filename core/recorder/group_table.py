"""What a rank shows of its communication: for each process group, which collective it has begun, ended and waits for.

The table stands behind the fixed part of the recorder, in the same header: `GROUPS` slots of `GROUP_BYTES`. A slot is
16 integers (`GroupField`), then the last `RECENT` operations (`OPERATION`), then the group's name and its members as
text. The rank writes in place; any bytes are read without harm.

A collective's number counts those of its group, from 1 on, and is the same on all its members as long as they issue
the same ones. What C++ issues without Python, such as DDP's reductions, is counted as well; from torch 2.14 on it is
described, too.
Sends and receives are counted apart, with numbers below 0.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from ..events.rank_standing import GroupState, IssuedOperation
from ..signal_errors import from_outside
from ..values import DTYPE_NAMES
from .layout import EARLIER_GROUP_BYTES, EARLIER_GROUPS, GROUP_BYTES, GROUPS

MOST_RANKS = 1 << 20
"""Of a group whose members are read."""
RECENT = 8
RECENT_AT = 128
NAME_AT = 448
NAME_BYTES = 40
MEMBERS_AT = 488
MEMBERS_BYTES = 152

OPERATIONS = (
    "",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "new_window",
)
"""By code. The first one is unknown."""

MOVE = struct.Struct("<qqqq")
"""BEGUN, STATE, AT, SINCE_NS: together, as all of them change when an operation begins."""
OPERATION = struct.Struct("<qqqqq")
"""number, what, elements, when it began (monotonic, ns), and how long after that its end was seen on the host (ns; 0:
not seen, as the host goes on or torch waits in C++)"""
OPERATION_BYTES = OPERATION.size
_EARLIER_OPERATIONS_AT, _EARLIER_NAME_AT = range(128, 384, 32), 384


class GroupField(IntEnum):
    """The integers of a slot, by position."""

    USED = 0
    BEGUN = 1
    """Number of the last collective that was begun."""
    STATE = 2
    AT = 3
    """Number of what it issues or waits for now, or did last."""
    SINCE_NS = 4
    """Of `STATE`, monotonic."""
    ENDED = 5
    """Highest number that it has waited for to its end, or ENDS_ON_DEVICE."""
    P2P = 6
    """Sends and receives so far."""
    P2P_WHAT = 7
    P2P_ELEMENTS = 8
    SIZE = 9
    COUNTED = 10
    """The group's own counter after the last operation. What it is ahead later, torch has issued without Python."""
    AFTER = 11
    """Its STATE after a call or a wait: NONE, or ON_DEVICE if all calls of the group are noted."""
    TIMEOUT_MS = 12
    """After how long a wait in it ends the rank; 0: not known. Negative if it ends `Work.wait()` alone, and no call
    that waits itself."""


ENDS_ON_DEVICE = -1
"""Waiting for a collective of NCCL makes a stream wait, and the host goes on."""


class GroupPhase(IntEnum):
    """What the rank does in a group, in a slot's STATE."""

    NONE = 0
    ISSUING = 1
    """It is inside of the call that begins an operation."""
    WAITING = 2
    FAILED = 3
    """The call or the wait has raised."""
    ISSUED = 4
    """C++ has issued it without Python, and waits where it needs the result."""
    ON_DEVICE = 5
    """A device was given it, and the host goes on."""


def what_of(operation: int, dtype: int, peer: int) -> int:
    """Code of the operation, code of the dtype, and rank within the group of its root or peer (-1: none), in one."""
    return operation | dtype << 8 | peer + 1 << 16


_IN_WORK = (GroupPhase.WAITING, GroupPhase.ISSUED)
"""In `Work.wait()`, of Python or of C++."""


def read_groups(data: bytes, now_ns: int, epoch_ns: int = 0) -> list[GroupState]:
    """The slots that are in use, from the `GROUPS * GROUP_BYTES` bytes of the table.

    `now_ns` is the monotonic clock; `epoch_ns` what the host's own clock is ahead of it.
    """
    at_each = (_group(data, slot * GROUP_BYTES, now_ns, epoch_ns) for slot in range(GROUPS))
    return [found for found in at_each if found is not None]


def widened(data: bytes) -> bytes:
    """The table of an earlier version as this one has it. Its operations have no times."""
    found = bytearray(GROUPS * GROUP_BYTES)
    for slot in range(EARLIER_GROUPS):
        earlier, at = data[slot * EARLIER_GROUP_BYTES : (slot + 1) * EARLIER_GROUP_BYTES], slot * GROUP_BYTES
        found[at : at + RECENT_AT] = earlier[:RECENT_AT]
        for number, place in enumerate(_EARLIER_OPERATIONS_AT):
            now_at = at + RECENT_AT + number * OPERATION_BYTES
            found[now_at : now_at + 24] = earlier[place : place + 24]
        found[at + NAME_AT : at + NAME_AT + 128] = earlier[_EARLIER_NAME_AT:]
    return bytes(found)


def progress_of(data: bytes) -> tuple[int, ...]:
    """What changes in the table when the rank issues something or has waited for something."""
    fields = memoryview(data).cast("q")
    wide = GROUP_BYTES // 8
    return tuple(
        fields[slot * wide + field]
        for slot in range(GROUPS)
        if fields[slot * wide]
        for field in (GroupField.BEGUN, GroupField.ENDED, GroupField.P2P, GroupField.SINCE_NS)
    )


def members_text(ranks: list[int]) -> str:
    """`0-3`, `1,5`, `0-6:2` (every second one); "" if that is too long.

    >>> members_text([0, 2, 4, 6, 7])
    '0-6:2,7'
    """
    parts = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at == 2 and step != 1:
            end -= 1
        first, last = ranks[at], ranks[end - 1]
        parts.append(f"{first}-{last}" + (f":{step}" if step != 1 else "") if end - at > 1 else f"{first}")
        at = end
    text = ",".join(parts)
    return text if len(text) <= MEMBERS_BYTES else ""


def members_of(text: str, most: int = MOST_RANKS) -> list[int]:
    """The ranks that `members_text` has written; [] for what it cannot have written, or for more than `most`.

    >>> members_of("0-6:2,7")
    [0, 2, 4, 6, 7]
    """
    found: list[int] = []
    try:
        for part in text.split(",") if text else ():
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            ranks = range(int(first), int(last or first) + 1, int(step or 1))
            if len(found) + len(ranks) > most:
                return []
            found.extend(ranks)
    except (ValueError, OverflowError) as error:
        if from_outside(error):
            raise
        return []
    return found


def _group(data: bytes, at: int, now_ns: int, epoch_ns: int) -> GroupState | None:
    fields = struct.unpack_from("<16q", data, at)
    if fields[GroupField.USED] != 1:
        return None
    places = range(at + RECENT_AT, at + RECENT_AT + OPERATION_BYTES * RECENT, OPERATION_BYTES)
    recent = [
        _issued(*found, epoch_ns=epoch_ns) for place in places if (found := OPERATION.unpack_from(data, place))[0] > 0
    ]
    sent = fields[GroupField.P2P]
    if sent > 0:
        recent.append(_issued(-sent, fields[GroupField.P2P_WHAT], fields[GroupField.P2P_ELEMENTS]))
    state, timeout_ms = fields[GroupField.STATE], fields[GroupField.TIMEOUT_MS]
    return GroupState(
        name=_text(data, at + NAME_AT, NAME_BYTES),
        members=_text(data, at + MEMBERS_AT, MEMBERS_BYTES),
        size=fields[GroupField.SIZE],
        begun=fields[GroupField.BEGUN],
        ended=max(0, fields[GroupField.ENDED]),
        phase=GroupPhase(state).name.lower() if state in GroupPhase._value2member_map_ else "none",
        at=fields[GroupField.AT],
        since_s=round(max(0, now_ns - fields[GroupField.SINCE_NS]) / 1e9, 1),
        timeout_s=max(timeout_ms, -timeout_ms if state in _IN_WORK else 0) / 1000,
        recent=sorted(recent, key=lambda issued: issued.number),
    )


def _issued(
    number: int, what: int, elements: int, began_ns: int = 0, took_ns: int = 0, *, epoch_ns: int = 0
) -> IssuedOperation:
    operation, dtype, peer = what & 0xFF, what >> 8 & 0xFF, (what >> 16 & 0xFFFF_FFFF) - 1
    return IssuedOperation(
        number,
        OPERATIONS[operation] if operation < len(OPERATIONS) else "",
        DTYPE_NAMES[dtype] if 0 < dtype < len(DTYPE_NAMES) else "",
        elements,
        peer,
        began_ns + epoch_ns if began_ns > 0 else 0,
        took_ns if 0 < took_ns < 1 << 62 else 0,
    )


def _text(data: bytes, at: int, size: int) -> str:
    return data[at : at + size].partition(b"\0")[0].decode("utf-8", "replace")
