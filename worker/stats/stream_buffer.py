"""One stream's rows on their device, and its copies to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .device_interface import StreamKey
from .torch_reader import Earlier, GroupedReadings, PackedRows, WaitingTensors


class DeviceRow:
    """The numbers on the device of a weight that was measured before. See `DeviceStatsBuffer.frame`."""

    __slots__ = ("buffer", "packed")

    def __init__(self, buffer: StreamBuffer) -> None:
        self.buffer = buffer
        """The stream that measured it."""
        self.packed: Earlier | None = None
        """Where its numbers are. None until they are packed, or if that failed."""


class RowBlock(NamedTuple):
    """Rows that are being copied to the values `positions` of one segment."""

    source: torch.Tensor
    """(n, 3) on the device, for the first to the last position. Kept until the copy has arrived."""
    positions: list[int]
    """Ascending"""
    staging: torch.Tensor | None
    """(n, 3) in pinned host memory, if the device cannot copy directly into the file."""


class RowCopy:
    """An outstanding copy of rows of one segment and one stream."""

    __slots__ = ("block", "event", "limits", "page", "values_at")

    def __init__(self, page: int, values_at: int) -> None:
        self.page = page
        self.values_at = values_at
        self.block: RowBlock
        self.limits: dict[int, int] = {}
        """Position -> see `Notable.wide_limit`."""
        self.event: Any = None


class StreamBuffer:
    """One stream's rows of the current segment, and its outstanding copies."""

    __slots__ = ("device", "flying", "key", "limits", "positions", "remembered", "rows", "stream", "waiting", "weights")

    def __init__(self, key: StreamKey, device: torch.device, stream: Any) -> None:
        self.key = key
        self.device = device
        self.stream = stream
        self.rows: torch.Tensor | None = None
        """(VALUES_PER_SEGMENT, COLUMNS); None until they are made, and after an error that did not reset them."""
        self.positions: list[int] = []
        """Positions in the segment whose copy was not started yet."""
        self.waiting: list[WaitingTensors] = []
        """Tensors among them that the next launch reads."""
        self.weights: list[WaitingTensors] = []
        """Weights among them that were read before. One launch deals with all of them before the rows are packed."""
        self.remembered: list[tuple[int, Sequence[DeviceRow]]] = []
        """The weights among them: the position of the first of some, and their rows."""
        self.limits: dict[int, int] = {}
        self.flying: deque[RowCopy] = deque()

    def drop(self) -> int:
        """Drop the values whose copy was not started. Returns their number."""
        dropped = len(self.positions)
        self.rows = None
        self.positions, self.waiting, self.weights, self.remembered, self.limits = [], [], [], [], {}
        return dropped

    def take_readings(self) -> GroupedReadings:
        """What waits for a launch. It waits no longer."""
        waiting = self.waiting + self.weights
        self.waiting, self.weights = [], []
        return GroupedReadings(waiting, self.device)


def remember(remembered: list[tuple[int, Sequence[DeviceRow]]], packed: PackedRows, first: int) -> None:
    """The rows of weights are packed now. `first`: the position of the first packed row."""
    for position, rows in remembered:
        for number, row in enumerate(rows, position - first):
            row.packed = packed, number


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
