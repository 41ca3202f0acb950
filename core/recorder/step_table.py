"""How long the parts of a rank's last steps took: a ring of `STEPS` entries of `STEP_BYTES` behind the table of groups.

An entry is the count of timed steps (1 for the first one), the step, then the nanoseconds of each part (`PARTS`), and
the count once more. It is whole if both counts are equal. The rank writes in place; any bytes are read without harm.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from .layout import STEP_BYTES, STEPS

PARTS = ("outside", "forward", "backward", "waiting", "optimizer")
"""`outside`: from the end of a step to the next forward: data loading, evaluation, checkpoints. `waiting`: for other
ranks, as far as the host sees it. It is in no other part."""
WAITING = PARTS.index("waiting")
ENTRY = struct.Struct("<8q")
assert ENTRY.size == STEP_BYTES == 8 * (3 + len(PARTS))


class TimedStep(NamedTuple):
    """One step: its number, and the nanoseconds of each of `PARTS`."""

    number: int
    parts: tuple[int, ...]


def read_steps(data: bytes, after: int) -> list[tuple[int, TimedStep]]:
    """(count, step) of the entries that were written after the first `after` ones, in their order."""
    found = []
    for position in range(STEPS):
        count, number, *parts, again = ENTRY.unpack_from(data, position * STEP_BYTES)
        if count == again > after and number >= 0 and min(parts) >= 0:
            found.append((count, TimedStep(number, tuple(parts))))
    return sorted(found)
