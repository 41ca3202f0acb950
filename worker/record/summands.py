"""--explain N: what this rank puts into sums over the ranks. A sum is written over it, so a copy is kept."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...core.events import ReducedElement
from ...core.frames import RowKind
from ...core.values import DTYPE_MAX, Value
from ..stats.device import without_modes
from ..stats.element_pattern import first_of, pattern_of
from ..stats.tensor_stats import measure
from .collectives import ranks

_MOST_BYTES = 1 << 30


class CloserLook(NamedTuple):
    """As in PassedTensor."""

    element: str = ""
    reduced: ReducedElement | None = None


NO_LOOK = CloserLook()


@dataclass(eq=False, repr=False)
class KeptSummands:
    """Copies in host memory, of at most 1 GiB in all, while a batch is explained."""

    is_on: bool = False
    _kept: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    """By id of a tensor that a sum is written into, or of the parameter whose gradient that is."""
    _bytes: int = 0

    def keep(self, holder: torch.Tensor, summand: torch.Tensor) -> None:
        """Copy it, if a sum of as large numbers of all ranks is beyond float16. Waits for a device."""
        if id(holder) in self._kept:
            self._bytes -= self._kept.pop(id(holder))[1].nbytes
        if type(summand) not in (torch.Tensor, torch.nn.Parameter) or not summand.is_floating_point():
            return
        found = without_modes(measure, summand)
        value = Value(*found[:3])
        is_large = found.kind == RowKind.MEASURED and value.abs_max * ranks() > DTYPE_MAX["float16"]
        if is_large and not value.flags and self._bytes + summand.nbytes <= _MOST_BYTES:
            self._kept[id(holder)] = weakref.ref(holder), without_modes(summand.to, "cpu", copy=True)
            self._bytes += summand.nbytes

    def first_bad(self, holder: torch.Tensor, total: torch.Tensor) -> ReducedElement | None:
        """The first element of a sum that is not finite, and this rank's part of it; None if that is not looked for."""
        index = without_modes(first_of, total) if self.is_on else None
        if index is None:
            return None
        ref, kept = self._kept.get(id(holder), (lambda: None, total))
        known = ref() is holder and kept.shape == total.shape
        return ReducedElement(index, float(kept[tuple(index)]) if known else None)

    def look_closer(self, tensor: torch.Tensor, came_out: bool) -> CloserLook:
        """At a tensor that was not finite as it went into an operation, or came out of it. Waits for a device."""
        with suppress(RuntimeError, MemoryError):  # no memory for it: the operation is recorded without it
            reduced = self.first_bad(tensor, tensor) if came_out else None
            return CloserLook(without_modes(pattern_of, tensor), reduced)
        return NO_LOOK

    def forget(self) -> None:
        """The batch is over."""
        self.is_on, self._bytes = False, 0
        self._kept.clear()
