"""Which elements of a tensor are not finite, in words. An expert looks at that pattern first.

And for --explain N: what this rank puts into sums over the ranks. A sum is written over it, so a copy is kept.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...core.events.alarm_evidence import EVERYTHING
from ...core.events.read_tensors import ReducedElement
from ...core.frames import RowKind
from ...core.signal_errors import suppress_own
from ...core.values import DTYPE_MAX, Value
from ..device.device import without_modes
from .collectives import ranks
from .plain_tensor import local_part, to_plain
from .tensor_stats import measure

_MOST_LISTED = 4
_MOST_ROWS = 16
_OF_MATRIX = ("row", "column")


def pattern_of(tensor: torch.Tensor) -> str:
    """The elements that are not finite; "" if there are none, or they cannot be read. Waits for a device.

    `everything`, `one element of 4.2M, at [3, 5]`, `all of row 17 (dim 0)`, `12 of 4096 elements, all in rows 3, 5
    (dim 0), the first at [3, 0]`. A matrix has rows and columns; the dimensions of other tensors have numbers alone.
    """
    plain = to_plain(tensor)
    if plain is None:
        return ""
    bad = ~torch.isfinite(plain)
    total, count = bad.numel(), int(bad.sum())
    if not count:
        return ""
    of_shard = " of this rank's shard" if local_part(tensor) is not tensor else ""
    return f"{_words(bad, total, count)}{of_shard}"


def bad_inputs(arguments: list[tuple[str, Any]]) -> dict[str, str]:
    """Role -> `pattern_of`, of the arguments that hold nan or inf and are tensors in host memory."""
    found: dict[str, str] = {}
    for role, leaf in arguments:
        if _is_read(leaf) and (pattern := pattern_of(leaf)):
            found[role] = pattern
    return found


def bad_rows(arguments: list[tuple[str, Any]]) -> dict[str, list[int]]:
    """Role -> the indices along dim 0 that hold nan or +inf, of the arguments that `bad_inputs` reads.

    Left out are those of which all rows are bad, or more than 16.
    """
    found: dict[str, list[int]] = {}
    for role, leaf in arguments:
        plain = to_plain(leaf) if _is_read(leaf) else None
        if plain is not None and plain.dim() and len(plain) > 1 and len(plain) == len(leaf):
            rows = plain.detach().reshape(len(plain), -1)
            indices = (rows.isnan() | (rows == math.inf)).any(1).nonzero().flatten().tolist()
            if 0 < len(indices) < len(plain) and len(indices) <= _MOST_ROWS:
                found[role] = indices
    return found


def _is_read(leaf: Any) -> bool:
    is_on_host = type(leaf) is torch.Tensor and leaf.device.type == "cpu" and leaf.is_floating_point()
    return is_on_host and leaf.layout is torch.strided and leaf.nbytes <= _MOST_BYTES


def _words(bad: torch.Tensor, total: int, count: int) -> str:
    if count == total:
        return EVERYTHING
    first = _first(bad)
    if count == 1:
        return f"one element of {count_text(total)}, at {first}"
    dims = range(bad.dim())
    hit = [bad.any(dim=[other for other in dims if other != dim]) if len(dims) > 1 else bad for dim in dims]
    indices = [along.nonzero().flatten().tolist() for along in hit]
    narrow = [
        _within(dim, len(dims), indices[dim], bad.shape[dim]) for dim in dims if len(indices[dim]) < bad.shape[dim]
    ]
    if math.prod(map(len, indices)) == count:
        return f"all of {', '.join(narrow)}"
    inside = f", all in {', '.join(narrow)}" if narrow and len(dims) > 1 else ""
    return f"{count_text(count)} of {count_text(total)} elements{inside}, the first at {first}"


def first_of(tensor: torch.Tensor) -> list[int] | None:
    """Index of the first element that is not finite; None if there is none or it is unreadable. Waits for a device."""
    plain = to_plain(tensor)
    bad = ~torch.isfinite(plain) if plain is not None else None
    return _first(bad) if bad is not None and bad.any() else None


def _first(bad: torch.Tensor) -> list[int]:
    position, index = int(bad.reshape(-1).to(torch.uint8).argmax()), []
    for size in reversed(bad.shape):  # torch.unravel_index imports sympy, which takes seconds
        position, along = divmod(position, size)
        index.append(along)
    return index[::-1]


def _within(dim: int, dims: int, indices: list[int], size: int) -> str:
    """`row 17 (dim 0)`, `rows 3, 5 (dim 0)`, `12 of 64 rows (dim 0), from 3 on`; of other tensors `17 of dim 1`."""
    name = _OF_MATRIX[dim] if dims == 2 else "index" if dims > 1 else "element"
    where = f" (dim {dim})" if dims == 2 else f" of dim {dim}" if dims > 2 else ""
    if len(indices) > _MOST_LISTED:
        plural = "indices" if name == "index" else f"{name}s"
        return f"{len(indices)} of {size} {plural}{where} from {indices[0]} to {indices[-1]}"
    plural = name if len(indices) == 1 else "indices" if name == "index" else f"{name}s"
    return f"{plural} {', '.join(map(str, indices))}{where}"


def count_text(count: int) -> str:
    """
    >>> count_text(4096), count_text(4_200_000)
    ('4096', '4.2M')
    """
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


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
        is_large = found.content is RowKind.MEASURED and value.abs_max * ranks() > DTYPE_MAX["float16"]
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
        with suppress_own(RuntimeError, MemoryError):  # no memory for it: the operation is recorded without it
            reduced = self.first_bad(tensor, tensor) if came_out else None
            return CloserLook(without_modes(pattern_of, tensor), reduced)
        return NO_LOOK

    def forget(self) -> None:
        """The batch is over."""
        self.is_on, self._bytes = False, 0
        self._kept.clear()
