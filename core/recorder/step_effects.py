"""What the optimizer steps of a rank led to, from its pages: gradients that were all set to zero, weights that stay.

A page has three kinds of frames around a step, and a gradient's second row only if it has changed since the backward:

    BACKWARD    fc1   grad weight   abs max 3.0e+19
    COLLECTIVE  fc1   grad weight   abs max 0          right before the step: a clip by a norm of inf
    OPTIMIZER   fc1   weight        abs max 4.1e-01    right after it

No tensor is read for it, and nothing here runs in the training process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
from msgspec.structs import replace

from ..events.agent_events import UnmovedWeights, ZeroedGradients
from ..events.definitions import Definition, ModuleDef, RootDef, ShapeDef, SlotDef
from ..events.run_position import RunPosition
from ..frames import FramePhase, RowKind, RowMark
from ..roles import RoleKind, parse_role
from ..values import DTYPE_NAMES, DTYPES_OF_16_BITS, decode
from ..wire.messages import PageMessage
from .page_tables import PageTables
from .slot_table import SlotTable

_OTHER, _GRADIENT, _WEIGHT = range(3)
_KINDS = {RoleKind.GRAD_WEIGHT: _GRADIENT, RoleKind.WEIGHT: _WEIGHT}
_MOST_COUNTED = 1 << 16
_FEWEST_STEPS = 12
"""A warmup may begin with steps whose learning rate is 0."""

Numbers = tuple[int, int, int]
"""low, high, and the flags and the encoding of meta."""


class _ParameterRow(NamedTuple):
    """One row of a page."""

    place: int
    """Rows are in the order in which things happened."""
    slot: int
    shape: int
    dtype: int
    low: int
    high: int
    meta: int

    @property
    def abs_max(self) -> float:
        return decode(self.high, self.meta >> 8 & 0xFF)

    @property
    def abs_min(self) -> float:
        return decode(self.low, self.meta >> 8 & 0xFF)

    @property
    def numbers(self) -> Numbers:
        return self.low, self.high, self.meta & 0xFFFF


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
    weights: dict[int, _ParameterRow] = field(default_factory=dict)
    """By slot, as they were first seen."""
    with_gradient: set[int] = field(default_factory=set)
    """Slots of the gradients that a backward has made."""
    counted: dict[int, int] = field(default_factory=dict)
    """Step -> a batch that began after it, and whose gradients should have moved the weights."""
    is_stepped: bool = False
    """The optimizer that steps has a weight of it."""


class StepEffects:
    """The steps of one rank. It is fed with pages that are over, in any order."""

    def __init__(self) -> None:
        self._kinds = SlotTable(_OTHER, numpy.uint8)
        self._slots: dict[tuple[int, RoleKind, str], int] = {}
        self._defined: dict[int, SlotDef] = {}
        self._modules: dict[int, ModuleDef] = {}
        self._whole: list[int] = []
        """Modules that are a root themselves. Without a frame of one, `--modules` has left out a part of the model."""
        self._labels: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        """Shape -> number of elements."""
        self._roots: dict[int, _RootSteps] = {}
        self._has_moved = False
        """A weight has other numbers than in the first page. Nothing more is compared then."""

    def define(self, entries: Iterable[Definition]) -> None:
        """New definitions of the rank."""
        for entry in entries:
            if isinstance(entry, SlotDef):
                role = parse_role(entry.role)
                kind = _KINDS.get(role.kind, _OTHER)
                if kind != _OTHER and self._kinds.put(entry.id, kind):
                    self._slots[entry.module, role.kind, role.name] = entry.id
                    self._defined[entry.id] = entry
            elif isinstance(entry, ModuleDef):
                self._modules[entry.id] = entry
                if not entry.name:
                    self._whole.append(entry.id)
            elif isinstance(entry, RootDef):
                self._labels[entry.id] = entry.label
            elif isinstance(entry, ShapeDef):
                self._sizes[entry.id] = math.prod(entry.dims)

    def add(self, message: PageMessage, page: PageTables) -> None:
        """Read one page. One whose numbers are still on their way says nothing."""
        kinds = self._kinds.of(page.rows["slot"])
        is_gradient = kinds == _GRADIENT
        if not is_gradient.any() or not numpy.isin(page.frames["module"], self._whole).any():
            return
        is_measured = page.has_value
        if ((kinds != _OTHER) & is_measured & page.is_pending).any():
            return
        is_unknown = is_gradient & ~is_measured & (page.rows["kind"] != RowKind.EMPTY.number)
        if is_unknown.any() or (is_gradient & (page.rows["mark"] & RowMark.REHEARSED != 0)).any():
            return
        root = self._roots.setdefault(message.root, _RootSteps())
        handed = is_gradient & is_measured & page.rows_of(FramePhase.COLLECTIVE)
        stepped = (kinds == _WEIGHT) & is_measured & page.rows_of(FramePhase.OPTIMIZER)
        made = is_gradient & is_measured & page.rows_of(FramePhase.BACKWARD)
        root.is_stepped |= bool(stepped.any())
        if handed.any() or stepped.any():
            root.batches += 1
            values = page.values[page.positions[handed]]
            is_zero = (values["high"] == 0) & (values["meta"] & 0xFF == 0)
            if len(values) and is_zero.all() and not page.lost_frames:
                self._zeroed(root, message, page, made, handed, stepped)
        if not self._has_moved and self._are_the_same(root, _rows(page, (kinds == _WEIGHT) & is_measured)):
            self._count(root, message, {row.slot: row for row in _rows(page, made | handed)}, _rows(page, stepped))
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
        now = {row.slot: row for row in _rows(page, made)}  # of a gradient that several backwards made, the last one
        zeroed = {row.slot for row in _rows(page, handed)}
        if any(row.meta & 0xFF for row in now.values()):
            return
        lost = [row for row in now.values() if row.high and row.slot in zeroed]
        kept = {slot for slot, row in now.items() if row.high} - zeroed
        of_optimizer = self._gradients_of(_rows(page, stepped))
        if of_optimizer:
            kept &= of_optimizer.keys()
        # a step after the step itself: torch's checkpoints make an optimizer's state by one on zeros
        is_after = any(row.place > of_optimizer.get(row.slot, row.place) for row in _rows(page, handed))
        if not lost or kept or is_after:
            return
        largest = max(lost, key=lambda row: row.abs_max)
        module = self._module_of(largest.slot)
        same = [row for row in lost if row.dtype == largest.dtype]
        is_scaled = bool((page.rows["mark"][made] & RowMark.SCALED).any())
        found = ZeroedGradients(
            RunPosition(0, 0, message.step, message.batch, self._labels.get(message.root, "")),
            batches=1,
            of=1,
            last=message.batch,
            module=module.name,
            cls=module.cls,
            role=self._defined[largest.slot].role,
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

    def _root_size(self, row: _ParameterRow) -> float:
        return math.sqrt(self._sizes.get(row.shape, 1))

    # -- no weight moves ----------------------------------------------------------------------------------------

    def _are_the_same(self, root: _RootSteps, weights: list[_ParameterRow]) -> bool:
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
        gradients: dict[int, _ParameterRow],
        stepped: list[_ParameterRow],
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
        trained = {self._slot_of(slot, RoleKind.WEIGHT) for slot in root.with_gradient}
        if steps < _FEWEST_STEPS or not trained <= root.weights.keys():
            return None
        rows = [root.weights[slot] for slot in trained]
        # the optimizer may step on a copy in float32, whose small steps do not show in 16 bits for long
        if not root.is_stepped and all(DTYPE_NAMES[row.dtype] in DTYPES_OF_16_BITS for row in rows):
            return None
        largest = max(rows, key=lambda row: row.abs_max)
        module = self._module_of(largest.slot)
        role = self._defined[largest.slot].role
        first, last = min(root.counted), max(root.counted)
        return UnmovedWeights(
            RunPosition(0, 0, first, root.counted[first], self._labels.get(number, "")),
            *(steps, last - first, len(rows), module.name, module.cls, role, DTYPE_NAMES[largest.dtype]),
            *(largest.abs_max, largest.abs_min, root.is_stepped),
        )

    # -- names --------------------------------------------------------------------------------------------------

    def _gradients_of(self, stepped: list[_ParameterRow]) -> dict[int, int]:
        """Slots of the gradients of these weights -> where the first of the weight's rows stands."""
        found: dict[int, int] = {}
        for row in stepped:
            found.setdefault(self._slot_of(row.slot, RoleKind.GRAD_WEIGHT), row.place)
        return found

    def _slot_of(self, slot: int, kind: RoleKind) -> int:
        """The slot of the same parameter's gradient, or of the parameter itself; -1 if there is none."""
        entry = self._defined[slot]
        return self._slots.get((entry.module, kind, parse_role(entry.role).name), -1)

    def _module_of(self, slot: int) -> ModuleDef:
        return self._modules[self._defined[slot].module]


def _size(zeroed: ZeroedGradients) -> float:
    return zeroed.abs_max


def _rows(page: PageTables, chosen: Any) -> list[_ParameterRow]:
    """These rows, in their order in the page."""
    rows, values = page.rows[chosen], page.values[page.positions[chosen]]
    columns = [rows[name].tolist() for name in ("slot", "shape", "dtype")]
    columns += [values[name].tolist() for name in ("low", "high", "meta")]
    return [_ParameterRow(*row) for row in zip(numpy.flatnonzero(chosen).tolist(), *columns, strict=True)]
