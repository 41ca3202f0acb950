"""What passes between ranks and is not finite: what goes into collectives, sends and receives, and what comes out.

Tensors are looked at when the operation begins and when somebody has waited for it: those in host memory by worker/
native/group_look.c, or `look_at`; others by worker/record/late_passed.py. A finite tensor leaves nothing behind.
What is told never raises an alarm.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...core.events import PassedTensor, RunPosition
from ...core.frames import RowKind
from ...core.recorder.group_table import OPERATIONS
from ...core.values import DTYPE_NAMES, NonFinite, decode, name_of
from ..stats.device import is_on_device
from ..stats.tensor_stats import CODES, FLOATS, FloatFormat, TensorStats, in_memory, measure
from .group_slots import GroupSlot, GroupTable, message_of
from .progress import RunProgress

NOT_LOOKED, NOT_FINITE = -1, -2
_MOST = 512
_MOST_ALIKE = 32
"""Events of one operation with one peer in one group, of one size: a metric that is nan leaves room for others."""
_ENCODINGS = {CODES[dtype]: kind.meta >> 8 & 0xFF for dtype, kind in FLOATS.items()}


class PassedLook(NamedTuple):
    """The bits of the largest number in some tensors, or NOT_LOOKED or NOT_FINITE, and the code of its dtype."""

    high: int
    dtype: int


NOTHING_LOOKED = PassedLook(NOT_LOOKED, 0)


def look_at(tensors: Any) -> PassedLook:
    """What is in the tensors of a list, or of lists in it. As worker/native/group_look.c."""
    found = NOTHING_LOOKED
    for tensor in tensors_in(tensors):
        place = _in_host_memory(tensor)
        if place is None:
            continue
        numbers = _measured(tensor)
        code = place[2].code
        if numbers.meta & 0xFF:
            return PassedLook(NOT_FINITE, code)
        if found.high == NOT_LOOKED or (found.dtype == code and found.high < numbers.high):
            found = PassedLook(numbers.high, code)
    return found


def refs_to(tensors: Any) -> list[weakref.ref[Any]]:
    """Weak references to the tensors that may be looked at once they are written."""
    return [weakref.ref(tensor) for tensor in tensors_in(tensors) if is_on_device(tensor) or in_memory(tensor)]


def tensors_in(tensors: Any) -> Iterator[torch.Tensor]:
    """Those of a list, or of lists in it."""
    if tensors.__class__ is list:
        for each in tensors:
            yield from tensors_in(each)
    elif isinstance(tensors, torch.Tensor):
        yield tensors


class NotedOperation(NamedTuple):
    """An operation, as GroupTable has noted it."""

    group: GroupSlot
    operation: int
    number: int
    peer: int
    """Rank in the job; -1: none, or not known."""
    tag: int


class PassedValues:
    """Records what passes and is not finite."""

    def __init__(self, progress: RunProgress, groups: GroupTable) -> None:
        self._progress = progress
        self._groups = groups
        self._told: defaultdict[tuple[object, ...], int] = defaultdict(int)
        self._all = 0

    def note(
        self,
        slot: int,
        number: int,
        operation: int,
        root: int,
        message: int,
        came_out: bool,
        high: int,
        dtype: int,
        tensors: Any,
    ) -> None:
        """Some of `tensors` are not finite: they go in, or they came out. `high`, `dtype`: of a `PassedLook`."""
        passing = self.passing(slot, number, operation, root, message)
        worst = self._worst(tensors)
        if passing is not None and worst is not None:
            tensor, flags = worst
            self.tell(passing, came_out, PassedLook(high, dtype), flags, CODES.get(tensor.dtype, 0), tensor.numel())

    def passing(self, slot: int, number: int, operation: int, root: int, message: int) -> NotedOperation | None:
        """The operation of a place in the table; None if its group is gone."""
        group = self._groups.slot_at(slot)
        if group is None:
            return None
        if message < 0:
            return NotedOperation(group, operation, number, group.member(root), 0)
        number, member, tag = message_of(message)
        return NotedOperation(group, operation, number, group.member(member), tag)

    def where(self) -> RunPosition:
        """The place in the run, now."""
        return self._progress.where()

    def tell(
        self,
        passing: NotedOperation,
        came_out: bool,
        given: PassedLook,
        flags: int,
        dtype: int,
        elements: int,
        where: RunPosition | None = None,
    ) -> None:
        """Record it, unless so many of its kind were. `where` it was: now, if that is not given."""
        group, operation, number, peer, tag = passing
        key = (operation, group.number, peer, came_out, dtype, elements)
        if self._told[key] >= _MOST_ALIKE or self._all >= _MOST:
            return
        self._told[key] += 1
        self._all += 1
        high = given.high
        self._progress.recorder.append(
            PassedTensor(
                where if where is not None else self._progress.where(),
                OPERATIONS[operation],
                group.name,
                group.members,
                number,
                peer,
                tag,
                bool(came_out),
                name_of(NonFinite(flags)),
                DTYPE_NAMES[dtype],
                elements,
                "" if high == NOT_LOOKED else "not finite" if high == NOT_FINITE else "finite",
                decode(high, _ENCODINGS[given.dtype]) if high >= 0 and given.dtype in _ENCODINGS else None,
            )
        )

    @staticmethod
    def _worst(tensors: Any) -> tuple[torch.Tensor, int] | None:
        found = [(t, _measured(t).meta & 0xFF) for t in tensors_in(tensors) if _in_host_memory(t) is not None]
        bad = [(tensor, flags) for tensor, flags in found if flags]
        return max(bad, key=lambda each: bool(each[1] & NonFinite.NAN), default=None)


def _in_host_memory(tensor: torch.Tensor) -> tuple[int, int, FloatFormat] | None:
    return None if is_on_device(tensor) else in_memory(tensor)


def _measured(tensor: torch.Tensor) -> TensorStats:
    with torch.no_grad():
        numbers = measure(tensor)
    return numbers if numbers.kind == RowKind.MEASURED else TensorStats(0, 0, 0, numbers.kind)
