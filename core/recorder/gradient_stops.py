"""Where a gradient ends on its way back through a model, from a rank's pages: an activation that passes nothing on.

    forward   fc1  output       abs max 1.0e+02        what the activation was handed is not zero,
    forward   act  output       abs max 0              and what it returned is
    backward  act  grad output  abs max 2.4e-01        a gradient reaches it,
    backward  fc1  grad output  abs max 0              and none comes out of it
    backward  fc1  grad weight  abs max 0

A gradient that is zero is no fault by itself: an expert that no token reaches, a layer behind a weight that begins at
zero, a term of the loss that is met. There none reaches the activation. A weight without a gradient has no row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy
from msgspec.structs import replace

from ..events.agent_events import StoppedGradient
from ..events.run_position import RunPosition
from ..frames import FramePhase, RowMark
from ..values import decode
from ..wire.messages import PageMessage
from .page_tables import PageTables
from .slot_owners import SlotKind, SlotOwners

ACTIVATIONS = frozenset(
    {
        *("ReLU", "ReLU6", "Hardtanh", "Hardsigmoid", "Hardswish", "Hardshrink", "Softshrink", "Threshold", "GELU"),
        *("SiLU", "Mish", "Softplus", "Sigmoid", "LogSigmoid", "Tanh", "Softsign", "Softmax", "LogSoftmax"),
    }
)
"""Classes of torch.nn without weights, whose derivative is 0, or is rounded to 0, for some inputs. A class of the
script's may stop a gradient on purpose."""
FEWEST_BATCHES = 16
"""A weight that begins at zero (LoRA's B) passes a gradient on after a step or two; and one odd batch tells nothing."""
FEWEST_ELEMENTS = 512
"""In all these batches together: of a few units on a few samples none may happen to be active."""
_MOST_BATCHES = 1024
_MOST_TOLD = 8


class _CallRow(NamedTuple):
    """One row of a page."""

    place: int
    """Rows are in the order in which things happened."""
    kind: int
    owner: int
    position: int
    """Where its value is in the page: of the same tensor it is the same."""
    shape: int
    abs_min: float
    abs_max: float
    flags: int


@dataclass(slots=True)
class _StoppedLayer:
    """A module whose weights got gradients that are exactly zero, because something behind it passes none on."""

    batches: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_MOST_BATCHES))
    """(batch, step), as they were read."""
    passed: int = -1
    """The last batch in which its weights got a gradient."""
    last: StoppedGradient | None = None
    """As the newest of these batches shows it."""
    elements: int = 0
    """That were returned by the activation in one batch."""
    least: float = float("inf")
    most: float = 0.0
    arrived: float = 0.0


class GradientStops:
    """The gradients of one rank. It is fed with pages that are over, in any order."""

    def __init__(self, slots: SlotOwners) -> None:
        self._slots = slots
        self._found: dict[int, _StoppedLayer] = {}
        """By the module with the weights."""

    def add(self, message: PageMessage, page: PageTables) -> None:
        """Read one page. One whose numbers are still on their way says nothing."""
        kinds = self._slots.kinds(page.rows["slot"])
        is_there = page.has_value & (kinds != SlotKind.OTHER)
        made = is_there & (kinds == SlotKind.GRAD_WEIGHT) & page.rows_of(FramePhase.BACKWARD)
        if not made.any() or page.lost_frames or (page.rows["mark"][made] & RowMark.REHEARSED).any():
            return
        if (is_there & page.is_pending).any():
            return
        owners = self._slots.owners(page.rows["slot"])
        values = page.values[page.positions[made]]
        is_zero = (values["high"] == 0) & (values["meta"] & 0xFF == 0)
        got = set(owners[made][~is_zero].tolist())
        for module in self._found.keys() & got:
            self._found[module].passed = max(self._found[module].passed, message.batch)
        without = set(owners[made][is_zero].tolist()) - got
        if without:
            of_call = page.rows_of(FramePhase.FORWARD) & (kinds != SlotKind.GRAD_WEIGHT)
            of_call |= page.rows_of(FramePhase.BACKWARD) & (kinds == SlotKind.GRAD_OUTPUT)
            self._look(message, without, self._rows(page, kinds, owners, is_there & of_call))

    def events(self, rank: int, attempt: int) -> Iterator[StoppedGradient]:
        """What was found so far, the first layers of the model first."""
        told = 0
        for module in sorted(self._found):
            layer = self._found[module]
            batches = sorted(each for each in layer.batches if each[0] > layer.passed)
            if layer.last is None or len(batches) < FEWEST_BATCHES or told == _MOST_TOLD:
                continue
            if len(batches) * layer.elements >= FEWEST_ELEMENTS:
                told += 1
                first, step = batches[0]
                where = RunPosition(rank, attempt, step, first, layer.last.where.root)
                numbers = {"least": layer.least, "most": layer.most, "arrived": layer.arrived}
                yield replace(layer.last, where=where, batches=len(batches), last=batches[-1][0], **numbers)

    def _rows(self, page: PageTables, kinds: Any, owners: Any, chosen: Any) -> dict[int, dict[int, list[_CallRow]]]:
        """Module -> kind -> rows, in their order in the page."""
        found: dict[int, dict[int, list[_CallRow]]] = {}
        places = numpy.flatnonzero(chosen)
        positions = page.positions[places]
        values = page.values[positions]
        heads = [each.tolist() for each in (places, kinds[places], owners[places], positions)]
        numbers = [values[name].tolist() for name in ("low", "high", "meta")]
        rows = zip(*heads, page.rows["shape"][places].tolist(), *numbers, strict=True)
        for place, kind, owner, position, shape, low, high, meta in rows:
            least, most = (decode(bits, meta >> 8 & 0xFF) for bits in (low, high))
            row = _CallRow(place, kind, owner, position, shape, least, most, meta & 0xFF)
            found.setdefault(row.owner, {}).setdefault(row.kind, []).append(row)
        return found

    def _look(self, message: PageMessage, without: set[int], calls: dict[int, dict[int, list[_CallRow]]]) -> None:
        weighted = sorted(
            (module for module, rows in calls.items() if SlotKind.WEIGHT in rows and SlotKind.OUTPUT in rows),
            key=lambda module: calls[module][SlotKind.OUTPUT][0].place,
        )
        after = dict(pairwise(weighted))
        handed: dict[int, list[int]] = {}
        """Position of a value -> the modules that were handed it."""
        from_activations: set[int] = set()
        """Positions of what these have returned."""
        for module, rows in calls.items():
            for row in rows.get(SlotKind.ARGUMENT, ()):
                handed.setdefault(row.position, []).append(module)
            if self._slots.module(module).cls in ACTIVATIONS:
                from_activations.update(row.position for row in rows.get(SlotKind.OUTPUT, ()))
        for module in without:
            given = self._given(calls.get(module, {}), from_activations)
            if given is None:
                continue
            takers = [taker for taker in handed.get(given.position, ()) if self._slots.module(taker).cls in ACTIVATIONS]
            found = self._by_activation(calls[takers[0]], takers[0]) if len(takers) == 1 else None
            found = found or self._by_next(given, module, after.get(module, -1), calls)
            if found is not None:
                self._note(message, module, given, *found)

    @staticmethod
    def _given(rows: dict[int, list[_CallRow]], from_activations: set[int]) -> _CallRow | None:
        """What the module returned, if it was called once, with numbers, and no gradient came back to it.

        One that was handed nothing but zeros, as an expert without tokens may be, has no say; but for those of an
        activation, which may be dead like the one behind.
        """
        argument, output, gradients = (
            rows.get(kind, []) for kind in (SlotKind.ARGUMENT, SlotKind.OUTPUT, SlotKind.GRAD_OUTPUT)
        )
        if len(output) != 1 or len(argument) != 1 or not gradients or any(row.flags for row in (*argument, *output)):
            return None
        is_cut = all(row.abs_max == 0 and not row.flags for row in gradients)
        has_say = argument[0].abs_max or argument[0].position in from_activations
        return output[0] if is_cut and output[0].abs_max and has_say else None

    @staticmethod
    def _by_activation(rows: dict[int, list[_CallRow]], module: int) -> tuple[_CallRow, float, int, int] | None:
        """(what it returned, the gradient that reached it, activation, -1) if it was called once."""
        output, arrived = rows.get(SlotKind.OUTPUT, []), _arrived(rows)
        return (output[0], arrived, module, -1) if len(output) == 1 and arrived and not output[0].flags else None

    def _by_next(
        self, given: _CallRow, module: int, then: int, calls: dict[int, dict[int, list[_CallRow]]]
    ) -> tuple[_CallRow, float, int, int] | None:
        """The next module with weights beside it is handed nothing but zeros, and a gradient reaches it. What lies
        between the two makes them: a function, or an activation that is called several times or works in place."""
        rows = calls.get(then, {})
        argument, arrived = rows.get(SlotKind.ARGUMENT, []), _arrived(rows)
        beside, name = self._slots.module(then).name, self._slots.module(module).name
        if len(argument) != 1 or not arrived or beside.rpartition(".")[0] != name.rpartition(".")[0]:
            return None
        is_zero = argument[0].abs_max == 0 and not argument[0].flags
        return (argument[0], arrived, -1, then) if is_zero and argument[0].shape == given.shape else None

    def _note(
        self,
        message: PageMessage,
        module: int,
        given: _CallRow,
        returned: _CallRow,
        arrived: float,
        activation: int,
        then: int,
    ) -> None:
        layer = self._found.setdefault(module, _StoppedLayer())
        layer.batches.append((message.batch, message.step))
        layer.elements = self._slots.size(returned.shape)
        layer.least, layer.most = min(layer.least, returned.abs_min), max(layer.most, returned.abs_max)
        layer.arrived = max(layer.arrived, arrived)
        if layer.last is None or message.batch >= layer.last.last:
            own, stops, behind = (self._slots.module(each) for each in (module, activation, then))
            layer.last = StoppedGradient(
                RunPosition(0, 0, message.step, message.batch, self._slots.label(message.root)),
                *(1, message.batch, own.name, own.cls, stops.name, stops.cls, behind.name, behind.cls, given.abs_max),
            )


def _arrived(rows: dict[int, list[_CallRow]]) -> float:
    """The largest gradient of what a module returned; 0 if there is none, or one that is not finite."""
    gradients = rows.get(SlotKind.GRAD_OUTPUT, [])
    return max((row.abs_max for row in gradients), default=0.0) if not any(row.flags for row in gradients) else 0.0
