"""One stream's rows on their device, and its outstanding copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..record.plain_tensor import version_of
from .device import StreamKey
from .grouped_readings import Earlier, GroupedReadings, PackedRows, WaitingTensors


class DeviceRow:
    """The numbers on the device of a weight that was measured before. See `DeviceStatsBuffer.frame`."""

    __slots__ = ("buffer", "packed", "place")

    def __init__(self, buffer: StreamBuffer, place: tuple[int, int] | None = None) -> None:
        self.buffer = buffer
        """The stream that measured it."""
        self.place = place
        """Address and bytes of the weight then, if these were found to lie in its storage, in order."""
        self.packed: Earlier | None = None
        """Where its numbers are. None until they are packed, or if that failed."""


@dataclass(slots=True, eq=False)
class RowCopy:
    """An outstanding copy of rows of one stream to the values `positions` of one segment."""

    page: int
    values_at: int
    source: torch.Tensor
    """(n, 3) on the device, for the first to the last position. Kept until the copy has arrived."""
    positions: list[int]
    """Ascending"""
    staging: torch.Tensor | None
    """(n, 3) in pinned host memory, if the device cannot copy directly into the file, or one of the first copies."""
    limits: dict[int, int]
    """Position -> see `NotableFilter.wide_limit`."""
    guarded: bool = False
    """Its numbers are PENDING if a kernel was wrong (reader_check.py)."""
    event: Any = None


@dataclass(slots=True, eq=False)
class StreamBuffer:
    """One stream's rows of the current segment, and its outstanding copies."""

    key: StreamKey
    device: torch.device
    stream: Any
    rows: torch.Tensor | None = None
    """(VALUES_PER_SEGMENT, COLUMNS); None until they are made, and after an error that did not reset them."""
    positions: list[int] = field(default_factory=list)
    """Positions in the segment whose copy was not started yet."""
    waiting: list[WaitingTensors] = field(default_factory=list)
    """Tensors among them that the next launch reads."""
    held: list[tuple[torch.Tensor, int, int, int]] = field(default_factory=list)
    """(tensor, version, address, position) of those that the script could change meanwhile."""
    weights: list[WaitingTensors] = field(default_factory=list)
    """Weights among them that were read before. One launch deals with all of them before the rows are packed."""
    remembered: list[tuple[int, Sequence[DeviceRow]]] = field(default_factory=list)
    """The weights among them: the position of the first of some, and their rows."""
    limits: dict[int, int] = field(default_factory=dict)
    flying: deque[RowCopy] = field(default_factory=deque)

    def drop(self) -> int:
        """Drop the values whose copy was not started. Returns their number."""
        dropped = len(self.positions)
        self.rows = None
        self.positions, self.waiting, self.weights, self.remembered, self.limits = [], [], [], [], {}
        self.held = []
        return dropped

    def drop_changed(self) -> int:
        """Drop the waiting tensors that were changed in place: their numbers are lost. Returns how many there were.

        A tensor whose memory was freed, or became smaller, has another address.
        """
        held, self.held = self.held, []
        changed = {
            position
            for tensor, version, address, position in held
            if version_of(tensor) != version or tensor.data_ptr() != address
        }
        if changed:
            self.waiting = [one for one in self.waiting if one.first not in changed]
            self.positions = [position for position in self.positions if position not in changed]
            for position in changed:
                self.limits.pop(position, None)
        return len(changed)

    def take_readings(self) -> GroupedReadings:
        """Take the readings that wait for a launch out of the queue."""
        waiting = self.waiting + self.weights
        self.waiting, self.weights = [], []
        return GroupedReadings(waiting, self.device)


def remember(remembered: list[tuple[int, Sequence[DeviceRow]]], packed: PackedRows, first: int) -> None:
    """The rows of weights are packed now. `first`: the position of the first packed row."""
    for position, rows in remembered:
        for number, row in enumerate(rows, position - first):
            row.packed = packed, number
