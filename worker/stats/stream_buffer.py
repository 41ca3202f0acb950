"""One stream's rows on their device, and its copies to the host."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

from .device import StreamKey


class DeviceRow:
    """The numbers of a tensor that was measured before, wherever they are by now: see `DeviceStatsBuffer.again`."""

    __slots__ = ("buffer", "is_lost", "is_notable", "limit", "numbers", "packed", "position")

    def __init__(self, buffer: StreamBuffer, position: int, limit: int | None) -> None:
        self.buffer = buffer
        """Where it was measured."""
        self.position = position
        """Its position in the segment in which it was measured."""
        self.limit = limit
        """See `Notable.limit`."""
        self.packed: tuple[torch.Tensor, int] | None = None
        """(n, 3) on the device and its row in it, from the time its copy was started until it has arrived."""
        self.numbers: tuple[int, int, int] | None = None
        """low, high, meta, once they have been seen to arrive."""
        self.is_notable = False
        """What arrived is worth a closer look."""
        self.is_lost = False
        """Its copy could not be started."""

    def arrive(self, numbers: tuple[int, int, int], is_notable: bool) -> None:
        """The host knows the numbers: nothing on the device is needed any more."""
        self.numbers = numbers
        self.is_notable = is_notable
        self.packed = None


class Block(NamedTuple):
    """Rows on their way to the values `positions` of one segment."""

    source: torch.Tensor
    """(n, 3) on the device; kept until the copy has arrived."""
    rows: list[int]
    """Where in `source` the rows of the positions are, ascending as the positions are."""
    positions: list[int]
    staging: torch.Tensor | None
    """(n, 3) in pinned host memory, where copies cannot go straight into the file."""


class Copy:
    """Rows of one segment and one stream on their way."""

    __slots__ = ("blocks", "event", "limits", "page", "remembered", "values_at")

    def __init__(self, page: int, values_at: int) -> None:
        self.page = page
        self.values_at = values_at
        self.blocks: list[Block] = []
        self.remembered: list[DeviceRow] = []
        self.limits: dict[int, int] = {}
        """Position -> see `Notable.limit`."""
        self.event: Any = None

    @property
    def positions(self) -> list[int]:
        """All values that it brings."""
        return [position for block in self.blocks for position in block.positions]


class StreamBuffer:
    """One stream's rows of the segment that is being written, and its copies that are on their way."""

    __slots__ = ("device", "flying", "key", "limits", "positions", "remembered", "repeats", "rows", "stream")

    def __init__(self, key: StreamKey, device: torch.device, stream: Any) -> None:
        self.key = key
        self.device = device
        self.stream = stream
        self.rows: torch.Tensor | None = None
        """(VALUES_PER_SEGMENT, COLUMNS); None until they are made, and after an error that left them as they were."""
        self.positions: list[int] = []
        """Positions in the segment that were read into rows, and whose copy was not started yet."""
        self.repeats: list[tuple[int, DeviceRow]] = []
        """Positions that are to hold the numbers of a row which this stream has measured before."""
        self.remembered: list[DeviceRow] = []
        self.limits: dict[int, int] = {}
        self.flying: deque[Copy] = deque()

    def drop(self) -> int:
        """Give up what was not copied yet; returns how many values that were."""
        dropped = len(self.positions) + len(self.repeats)
        for row in self.remembered:
            row.is_lost = True
        self.rows = None
        self.positions, self.repeats, self.remembered, self.limits = [], [], [], {}
        return dropped

    @property
    def has_rows(self) -> bool:
        """Whether there is something to copy."""
        return bool(self.positions or self.repeats)


def runs(positions: list[int]) -> list[tuple[int, int]]:
    """Ascending positions as half-open runs.

    >>> runs([0, 1, 2, 5, 6])
    [(0, 3), (5, 7)]
    """
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found
