"""Weights that steps leave as they are while they move others, from the pages of a rank.

    forward     fc1  weight       abs min 2.6e-03  abs max 3.5e-01
    collective  fc1  grad weight  abs min 1.1e-06  abs max 4.0e-02    what the step is handed: no element is zero
    optimizer   fc1  weight       abs min 2.6e-03  abs max 3.5e-01    and the smallest element has not moved
    optimizer   fc2  weight       ...                                 where another weight has

A weight without a gradient does not count: nothing in a page tells a part that is cut off by mistake from a head that
is not used, or an expert that no token reaches. Nor does one whose gradient was not read right before the step: a
script may have taken the gradient away to freeze it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from ..events.agent_events import UnmovedParts
from ..events.definitions import Definition
from ..events.run_position import RunPosition
from ..frames import FramePhase
from ..values import DTYPE_NAMES, decode
from ..wire.messages import PageMessage
from .page_tables import PageTables
from .slot_owners import SlotKind, SlotOwners
from .slot_table import SlotTable

FEWEST_BATCHES = 32
"""A part whose warmup begins a little later than the others' has moved by then."""
_LEAST_SPREAD = 16
"""abs max through abs min. The small elements move at learning rates at which a number near 1 stays as it is, such as
those of a warmup; a norm's weights are all near 1, and so do not count."""
_MOST_TOLD = 64


@dataclass(slots=True)
class _UnmovedWeight:
    """A weight that no step has moved so far."""

    numbers: tuple[int, ...]
    root: int
    batches: int = 0
    first: tuple[int, int] = (1 << 62, 0)
    """(batch, step)"""
    last: int = -1
    gradient: float = 0.0


class PartSteps:
    """The steps of one rank. It is fed with pages that are over, in any order."""

    def __init__(self) -> None:
        self._slots = SlotOwners()
        self._has_moved = SlotTable(0, numpy.uint8)
        self._moved: set[int] = set()
        self._unmoved: dict[int, _UnmovedWeight] = {}
        """By slot."""

    def define(self, entries: Iterable[Definition]) -> None:
        """New definitions of the rank."""
        self._slots.define(entries)

    def add(self, message: PageMessage, page: PageTables) -> None:
        """Read one page. Numbers that are still on their way are as if they were not there."""
        slots = page.rows["slot"]
        kinds = self._slots.kinds(slots)
        is_there = page.has_value & ~page.is_pending
        stepped = (kinds == SlotKind.WEIGHT) & is_there & page.rows_of(FramePhase.OPTIMIZER)
        if not stepped.any() or self._has_moved.of(slots[stepped]).all():
            return
        before = (kinds == SlotKind.WEIGHT) & is_there & page.rows_of(FramePhase.FORWARD)
        handed = (kinds == SlotKind.GRAD_WEIGHT) & is_there & page.rows_of(FramePhase.COLLECTIVE)
        olds = _rows(page, numpy.flatnonzero(before)[::-1])
        news, gradients = (_rows(page, numpy.flatnonzero(chosen)) for chosen in (stepped, handed))
        moved = [slot for slot, row in news.items() if slot in olds and olds[slot] != row]
        for slot in moved:
            self._move(slot)
        for slot, row in news.items():
            if slot in self._moved or slot not in olds:
                continue
            known = self._unmoved.setdefault(slot, _UnmovedWeight(row, message.root))
            if known.numbers != row:
                self._move(slot)
            elif moved and (gradient := gradients.get(self._slots.gradient_of(slot))) and _shows(row, gradient):
                known.batches += 1
                known.first = min(known.first, (message.batch, message.step))
                known.last = max(known.last, message.batch)
                known.gradient = max(known.gradient, _abs_max(gradient))

    def _move(self, slot: int) -> None:
        self._has_moved.put(slot, 1)
        self._moved.add(slot)
        self._unmoved.pop(slot, None)

    def events(self, rank: int, attempt: int) -> Iterator[UnmovedParts]:
        """What was found so far: one for each root."""
        left = {slot: each for slot, each in self._unmoved.items() if each.batches >= FEWEST_BATCHES}
        for root in sorted({each.root for each in left.values()}):
            own = sorted(slot for slot, each in left.items() if each.root == root)[:_MOST_TOLD]
            batch, step = min(left[slot].first for slot in own)
            one = left[own[0]]
            yield UnmovedParts(
                RunPosition(rank, attempt, step, batch, self._slots.label(root)),
                *(min(left[slot].batches for slot in own), max(left[slot].last for slot in own), len(self._moved)),
                *([self._slots.weight_name(slot) for slot in own], DTYPE_NAMES[one.numbers[1]]),
                *(_abs_max(one.numbers), one.gradient),
            )


def _rows(page: PageTables, places: Any) -> dict[int, tuple[int, ...]]:
    """Slot -> (shape, dtype, low, high, flags and encoding) of the last of these rows that has it."""
    rows, values = page.rows[places], page.values[page.positions[places]]
    columns = [rows[name].tolist() for name in ("slot", "shape", "dtype")]
    columns += [values["low"].tolist(), values["high"].tolist(), (values["meta"] & 0xFFFF).tolist()]
    return {slot: tuple(row) for slot, *row in zip(*columns, strict=True)}


def _shows(weight: tuple[int, ...], gradient: tuple[int, ...]) -> bool:
    """Whether a step on this gradient moves this weight's smallest element: no element of the gradient is zero."""
    least = decode(weight[2], weight[4] >> 8)
    is_spread = weight[3] == 0 or least * _LEAST_SPREAD <= _abs_max(weight)
    return gradient[2] > 0 and not gradient[4] & 0xFF and not weight[4] & 0xFF and is_spread


def _abs_max(row: tuple[int, ...]) -> float:
    return decode(row[3], row[4] >> 8)
