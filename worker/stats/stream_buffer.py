"""One stream's rows on their device, and its copies to the host."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

from .device import StreamKey


class DeviceRow:
    """The numbers of a tensor that was measured before, on the device or arrived. See `DeviceStatsBuffer.again`."""

    __slots__ = ("buffer", "is_lost", "is_notable", "limit", "numbers", "packed", "position")

    def __init__(self, buffer: StreamBuffer, position: int, limit: int | None) -> None:
        self.buffer = buffer
        """The stream that measured it."""
        self.position = position
        """Its position in the segment in which it was measured."""
        self.limit = limit
        """See `Notable.wide_limit`."""
        self.packed: tuple[torch.Tensor, int] | None = None
        """(n, 3) on the device, and its row in it, while its copy is outstanding."""
        self.numbers: tuple[int, int, int] | None = None
        """low, high, meta, once they have arrived."""
        self.is_notable = False
        """The numbers that arrived are notable."""
        self.is_lost = False
        """Its copy could not be started."""

    def arrive(self, numbers: tuple[int, int, int], is_notable: bool) -> None:
        """Keep the numbers that arrived, and release the memory on the device."""
        self.numbers = numbers
        self.is_notable = is_notable
        self.packed = None


class Block(NamedTuple):
    """Rows that are being copied to the values `positions` of one segment."""

    source: torch.Tensor
    """(n, 3) on the device. Kept until the copy has arrived."""
    rows: list[int]
    """The row in `source` of each position. Both are ascending."""
    positions: list[int]
    staging: torch.Tensor | None
    """(n, 3) in pinned host memory, if the device cannot copy directly into the file."""


class Copy:
    """An outstanding copy of rows of one segment and one stream."""

    __slots__ = ("blocks", "event", "limits", "page", "remembered", "values_at")

    def __init__(self, page: int, values_at: int) -> None:
        self.page = page
        self.values_at = values_at
        self.blocks: list[Block] = []
        self.remembered: list[DeviceRow] = []
        self.limits: dict[int, int] = {}
        """Position -> see `Notable.wide_limit`."""
        self.event: Any = None

    @property
    def positions(self) -> list[int]:
        """The positions of all its values."""
        return [position for block in self.blocks for position in block.positions]


class StreamBuffer:
    """One stream's rows of the current segment, and its outstanding copies."""

    __slots__ = ("device", "flying", "key", "limits", "positions", "remembered", "repeats", "rows", "stream")

    def __init__(self, key: StreamKey, device: torch.device, stream: Any) -> None:
        self.key = key
        self.device = device
        self.stream = stream
        self.rows: torch.Tensor | None = None
        """(VALUES_PER_SEGMENT, COLUMNS); None until they are made, and after an error that did not reset them."""
        self.positions: list[int] = []
        """Positions in the segment that were read into rows and whose copy was not started yet."""
        self.repeats: list[tuple[int, DeviceRow]] = []
        """Positions for the numbers of a row that this stream has measured before."""
        self.remembered: list[DeviceRow] = []
        self.limits: dict[int, int] = {}
        self.flying: deque[Copy] = deque()

    def drop(self) -> int:
        """Drop the values whose copy was not started. Returns their number."""
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
    """Ascending positions as half-open ranges.

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
