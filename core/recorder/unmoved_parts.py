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

from collections.abc import Iterator
from dataclasses import dataclass

import numpy

from ..events.agent_events import UnmovedParts
from ..events.run_position import RunPosition
from ..frames import FramePhase
from ..values import DTYPE_NAMES
from ..wire.messages import PageMessage
from .page_tables import PageTables
from .parameter_rows import ParameterRow, parameter_rows
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

    row: ParameterRow
    """As it was first seen after a step."""
    root: int
    batches: int = 0
    first: tuple[int, int] = (1 << 62, 0)
    """(batch, step)"""
    last: int = -1
    gradient: float = 0.0


class PartSteps:
    """The steps of one rank. It is fed with pages that are over, in any order."""

    def __init__(self, slots: SlotOwners) -> None:
        self._slots = slots
        self._has_moved = SlotTable(0, numpy.uint8)
        self._moved: set[int] = set()
        self._unmoved: dict[int, _UnmovedWeight] = {}
        """By slot."""

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
        olds = {row.slot: row for row in reversed(parameter_rows(page, before))}  # the first of each
        news, gradients = ({row.slot: row for row in parameter_rows(page, each)} for each in (stepped, handed))
        moved = [slot for slot, row in news.items() if slot in olds and _content(olds[slot]) != _content(row)]
        for slot in moved:
            self._move(slot)
        for slot, row in news.items():
            if slot in self._moved or slot not in olds:
                continue
            known = self._unmoved.setdefault(slot, _UnmovedWeight(row, message.root))
            if _content(known.row) != _content(row):
                self._move(slot)
            elif moved and (gradient := gradients.get(self._slots.gradient_of(slot))) and _shows(row, gradient):
                known.batches += 1
                known.first = min(known.first, (message.batch, message.step))
                known.last = max(known.last, message.batch)
                known.gradient = max(known.gradient, gradient.abs_max)

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
                *([self._slots.weight_name(slot) for slot in own], DTYPE_NAMES[one.row.dtype]),
                *(one.row.abs_max, one.gradient),
            )


def _content(row: ParameterRow) -> tuple[int, ...]:
    """All but the place."""
    return row.shape, row.dtype, *row.numbers


def _shows(weight: ParameterRow, gradient: ParameterRow) -> bool:
    """Whether a step on this gradient moves this weight's smallest element: no element of the gradient is zero."""
    is_spread = weight.high == 0 or weight.abs_min * _LEAST_SPREAD <= weight.abs_max
    return gradient.low > 0 and not gradient.meta & 0xFF and not weight.meta & 0xFF and is_spread
