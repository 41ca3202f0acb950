"""What the optimizer steps of a rank led to, from its pages: gradients that were all set to zero, weights that stay.

A page has three kinds of frames around a step, and a gradient's second row only if it has changed since the backward:

    BACKWARD    fc1   grad weight   abs max 3.0e+19
    COLLECTIVE  fc1   grad weight   abs max 0          right before the step: a clip by a norm of inf
    OPTIMIZER   fc1   weight        abs max 4.1e-01    right after it

No tensor is read for it, and nothing here runs in the training process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
from msgspec.structs import replace

from ..events.agent_events import UnmovedWeights, ZeroedGradients
from ..events.run_position import RunPosition
from ..frames import FramePhase, RowKind, RowMark
from ..values import DTYPE_NAMES, DTYPES_OF_16_BITS
from ..wire.messages import PageMessage
from .page_tables import PageTables
from .parameter_rows import ParameterRow, parameter_rows
from .slot_owners import SlotKind, SlotOwners

_MOST_COUNTED = 1 << 16
_FEWEST_STEPS = 12
"""A warmup may begin with steps whose learning rate is 0."""


@dataclass(slots=True)
class _ZeroedBatches:
    """Batches in which every gradient that a page shows right before a step was zero."""

    steps: dict[int, int] = field(default_factory=dict)
    """Batch -> steps before it."""
    largest: ZeroedGradients | None = None
    """The one with the largest gradients of the backward."""


@dataclass(slots=True)
class _RootSteps:
    """What is known of the steps on one root."""

    batches: int = 0
    """Those with a step, as far as they were read."""
    zeroed: dict[frozenset[int], _ZeroedBatches] = field(default_factory=dict)
    """By the gradients that the optimizer has and the page does not show. They are as an earlier backward left them, or
    were never made: `with_gradient` tells, once all pages were read."""
    weights: dict[int, ParameterRow] = field(default_factory=dict)
    """By slot, as they were first seen."""
    with_gradient: set[int] = field(default_factory=set)
    """Slots of the gradients that a backward has made."""
    counted: dict[int, int] = field(default_factory=dict)
    """Step -> a batch that began after it, and whose gradients should have moved the weights."""
    is_stepped: bool = False
    """The optimizer that steps has a weight of it."""


class StepEffects:
    """The steps of one rank. It is fed with pages that are over, in any order."""

    def __init__(self, slots: SlotOwners) -> None:
        self._slots = slots
        self._roots: dict[int, _RootSteps] = {}
        self._has_moved = False
        """A weight has other numbers than in the first page. Nothing more is compared then."""

    def add(self, message: PageMessage, page: PageTables) -> None:
        """Read one page. One whose numbers are still on their way says nothing."""
        kinds = self._slots.kinds(page.rows["slot"])
        is_gradient, is_weight = kinds == SlotKind.GRAD_WEIGHT, kinds == SlotKind.WEIGHT
        if not is_gradient.any() or not numpy.isin(page.frames["module"], self._slots.whole).any():
            return
        is_measured = page.has_value
        if ((is_gradient | is_weight) & is_measured & page.is_pending).any():
            return
        is_unknown = is_gradient & ~is_measured & (page.rows["kind"] != RowKind.EMPTY.number)
        if is_unknown.any() or (is_gradient & (page.rows["mark"] & RowMark.REHEARSED != 0)).any():
            return
        root = self._roots.setdefault(message.root, _RootSteps())
        handed = is_gradient & is_measured & page.rows_of(FramePhase.COLLECTIVE)
        stepped = is_weight & is_measured & page.rows_of(FramePhase.OPTIMIZER)
        made = is_gradient & is_measured & page.rows_of(FramePhase.BACKWARD)
        root.is_stepped |= bool(stepped.any())
        if handed.any() or stepped.any():
            root.batches += 1
            values = page.values[page.positions[handed]]
            is_zero = (values["high"] == 0) & (values["meta"] & 0xFF == 0)
            if len(values) and is_zero.all() and not page.lost_frames:
                self._zeroed(root, message, page, made, handed, stepped)
        if not self._has_moved and self._are_the_same(root, parameter_rows(page, is_weight & is_measured)):
            gradients = {row.slot: row for row in parameter_rows(page, made | handed)}
            self._count(root, message, gradients, parameter_rows(page, stepped))
        root.with_gradient.update(page.rows["slot"][made].tolist())

    def events(self, rank: int, attempt: int) -> Iterator[ZeroedGradients | UnmovedWeights]:
        """What was found so far."""
        for found in self._found():
            yield replace(found, where=replace(found.where, rank=rank, attempt=attempt))

    def _found(self) -> Iterator[ZeroedGradients | UnmovedWeights]:
        for root in self._roots.values():
            sure = [found for unseen, found in root.zeroed.items() if not unseen & root.with_gradient]
            largest = max((found.largest for found in sure if found.largest), key=_size, default=None)
            if largest is not None:
                steps = {batch: step for found in sure for batch, step in found.steps.items()}
                first, last = min(steps), max(steps)
                where = replace(largest.where, batch=first, step=steps[first])
                yield replace(largest, where=where, batches=len(steps), of=root.batches, last=last)
        if not self._has_moved:  # the root of a loss may be fixed, beside the one that is trained
            yield from filter(None, (self._unmoved(number, root) for number, root in self._roots.items()))

    # -- all gradients are zero ---------------------------------------------------------------------------------

    def _zeroed(
        self, root: _RootSteps, message: PageMessage, page: PageTables, made: Any, handed: Any, stepped: Any
    ) -> None:
        """The rows of the gradients right before the step are all zero: was that all that the optimizer got?"""
        # of a gradient that several backwards made, the last one
        now = {row.slot: row for row in parameter_rows(page, made)}
        zeroed = {row.slot for row in parameter_rows(page, handed)}
        if any(row.meta & 0xFF for row in now.values()):
            return
        lost = [row for row in now.values() if row.high and row.slot in zeroed]
        kept = {slot for slot, row in now.items() if row.high} - zeroed
        of_optimizer = self._gradients_of(parameter_rows(page, stepped))
        if of_optimizer:
            kept &= of_optimizer.keys()
        # a step after the step itself: torch's checkpoints make an optimizer's state by one on zeros
        is_after = any(row.place > of_optimizer.get(row.slot, row.place) for row in parameter_rows(page, handed))
        if not lost or kept or is_after:
            return
        largest = max(lost, key=lambda row: row.abs_max)
        module = self._slots.module_of(largest.slot)
        same = [row for row in lost if row.dtype == largest.dtype]
        is_scaled = bool((page.rows["mark"][made] & RowMark.SCALED).any())
        found = ZeroedGradients(
            RunPosition(0, 0, message.step, message.batch, self._slots.label(message.root)),
            batches=1,
            of=1,
            last=message.batch,
            module=module.name,
            cls=module.cls,
            role=self._slots.role(largest.slot),
            dtype=DTYPE_NAMES[largest.dtype],
            abs_max=largest.abs_max,
            norm_least=math.hypot(*(max(row.abs_max, self._root_size(row) * row.abs_min) for row in same)),
            norm_most=math.hypot(*(self._root_size(row) * row.abs_max for row in same)),
            is_scaled=is_scaled,
        )
        unseen = frozenset(of_optimizer.keys() - now.keys() - zeroed)
        batches = root.zeroed.setdefault(unseen, _ZeroedBatches())
        if len(batches.steps) < _MOST_COUNTED:
            batches.steps[message.batch] = message.step
        batches.largest = max(batches.largest or found, found, key=_size)

    def _root_size(self, row: ParameterRow) -> float:
        return math.sqrt(self._slots.size(row.shape) or 1)

    # -- no weight moves ----------------------------------------------------------------------------------------

    def _are_the_same(self, root: _RootSteps, weights: list[ParameterRow]) -> bool:
        """Whether the weights have the numbers that were first seen of them."""
        for row in weights:
            if root.weights.setdefault(row.slot, row).numbers != row.numbers:
                self._has_moved = True
                return False
        return True

    def _count(
        self,
        root: _RootSteps,
        message: PageMessage,
        gradients: dict[int, ParameterRow],
        stepped: list[ParameterRow],
    ) -> None:
        """Count a page after which a step should have moved a weight. `gradients`: the last row of each."""
        of_optimizer = self._gradients_of(stepped) or gradients.keys()
        used = [row for slot, row in gradients.items() if slot in of_optimizer]
        # where no element of a gradient is zero, a step moves the largest and the smallest element of its weight
        moves = any(row.low for row in used) and not any(row.meta & 0xFF for row in used)
        if moves and len(root.counted) < _MOST_COUNTED:
            root.counted.setdefault(message.step, message.batch)

    def _unmoved(self, number: int, root: _RootSteps) -> UnmovedWeights | None:
        steps = len(root.counted) - 1  # nothing shows what came of the last one, if the optimizer has no weight of it
        trained = {self._slots.weight_of(slot) for slot in root.with_gradient}
        if steps < _FEWEST_STEPS or not trained <= root.weights.keys():
            return None
        rows = [root.weights[slot] for slot in trained]
        # the optimizer may step on a copy in float32, whose small steps do not show in 16 bits for long
        if not root.is_stepped and all(DTYPE_NAMES[row.dtype] in DTYPES_OF_16_BITS for row in rows):
            return None
        largest = max(rows, key=lambda row: row.abs_max)
        module = self._slots.module_of(largest.slot)
        role = self._slots.role(largest.slot)
        first, last = min(root.counted), max(root.counted)
        return UnmovedWeights(
            RunPosition(0, 0, first, root.counted[first], self._slots.label(number)),
            *(steps, last - first, len(rows), module.name, module.cls, role, DTYPE_NAMES[largest.dtype]),
            *(largest.abs_max, largest.abs_min, root.is_stepped),
        )

    # -- names --------------------------------------------------------------------------------------------------

    def _gradients_of(self, stepped: list[ParameterRow]) -> dict[int, int]:
        """Slots of the gradients of these weights -> where the first of the weight's rows stands."""
        found: dict[int, int] = {}
        for row in stepped:
            found.setdefault(self._slots.gradient_of(row.slot), row.place)
        return found


def _size(zeroed: ZeroedGradients) -> float:
    return zeroed.abs_max
