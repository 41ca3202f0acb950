"""What passes between ranks and is not finite: what goes into collectives, sends and receives, and what comes out.

Tensors in host memory are looked at when the operation begins and when somebody has waited for it. worker/native/
group_look.c looks, or `look_at`; a finite tensor leaves nothing behind. What is told never raises an alarm.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...core.frames import RowKind
from ...core.recorder.group_table import OPERATIONS
from ...core.records import Passed
from ...core.values import DTYPE_NAMES, NonFinite, decode, name_of
from ..stats.tensor_stats import CODES, FLOATS, TensorStats, in_memory, measure
from .group_table import GroupTable, message_of
from .progress import Progress

NOT_LOOKED, NOT_FINITE = -1, -2
_MOST = 512
_MOST_ALIKE = 32
"""Events of one operation with one peer in one group, of one size: a metric that is nan leaves room for others."""
_ENCODINGS = {CODES[dtype]: kind.meta >> 8 & 0xFF for dtype, kind in FLOATS.items()}


class Look(NamedTuple):
    """The bits of the largest number in some tensors, or NOT_LOOKED or NOT_FINITE, and the code of its dtype."""

    high: int
    dtype: int


_NOTHING = Look(NOT_LOOKED, 0)


def look_at(tensors: Any) -> Look:
    """What is in the tensors of a list, or of lists in it. As worker/native/group_look.c."""
    found = _NOTHING
    for tensor in _tensors(tensors):
        place = in_memory(tensor)
        if place is None:
            continue
        numbers = _measured(tensor)
        code = place[2].code
        if numbers.meta & 0xFF:
            return Look(NOT_FINITE, code)
        if found.high == NOT_LOOKED or (found.dtype == code and found.high < numbers.high):
            found = Look(numbers.high, code)
    return found


def refs_to(tensors: Any) -> list[weakref.ref[Any]]:
    """Weak references to the tensors that `look_at` would look at."""
    return [weakref.ref(tensor) for tensor in _tensors(tensors) if in_memory(tensor) is not None]


class PassedValues:
    """Records what passes and is not finite."""

    def __init__(self, progress: Progress, groups: GroupTable) -> None:
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
        """Some of `tensors` are not finite: they go in, or they came out. `high`, `dtype`: what went in (`Look`)."""
        group = self._groups.slot_at(slot)
        tag, peer = 0, group.member(root) if group is not None else -1
        if message >= 0:
            number, member, tag = message_of(message)
            peer = group.member(member) if group is not None else -1
        worst = self._worst(tensors)
        if group is None or worst is None:
            return
        tensor, flags = worst
        key = (operation, slot, peer, came_out, tensor.dtype, tensor.numel())
        if self._told[key] >= _MOST_ALIKE or self._all >= _MOST:
            return
        self._told[key] += 1
        self._all += 1
        self._progress.recorder.append(
            Passed(
                self._progress.where(),
                OPERATIONS[operation],
                group.name,
                group.members,
                number,
                peer,
                tag,
                bool(came_out),
                name_of(NonFinite(flags)),
                DTYPE_NAMES[CODES.get(tensor.dtype, 0)],
                tensor.numel(),
                "" if high == NOT_LOOKED else "not finite" if high == NOT_FINITE else "finite",
                decode(high, _ENCODINGS[dtype]) if high >= 0 and dtype in _ENCODINGS else None,
            )
        )

    @staticmethod
    def _worst(tensors: Any) -> tuple[torch.Tensor, int] | None:
        found = [(t, _measured(t).meta & 0xFF) for t in _tensors(tensors) if in_memory(t) is not None]
        bad = [(tensor, flags) for tensor, flags in found if flags]
        return max(bad, key=lambda each: bool(each[1] & NonFinite.NAN), default=None)


def _measured(tensor: torch.Tensor) -> TensorStats:
    with torch.no_grad():
        numbers = measure(tensor)
    return numbers if numbers.kind == RowKind.MEASURED else TensorStats(0, 0, 0, numbers.kind)


def _tensors(tensors: Any) -> Iterator[torch.Tensor]:
    if tensors.__class__ is list:
        for each in tensors:
            yield from _tensors(each)
    elif isinstance(tensors, torch.Tensor):
        yield tensors
