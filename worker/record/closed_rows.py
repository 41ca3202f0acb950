"""Whether a mask is -inf throughout in one of its rows: softmax makes nan of that. Read while the mask is alive.

In host memory that is when a call has returned nan. On a device the mask is gone when that is known: it is computed in
each call, of the arguments that have held -inf in an earlier batch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...core.frames import RowMark
from ...core.recorder.own_pages import OwnPages
from ...core.recorder.writer import OpenPage
from ...core.values import NonFinite
from ..stats.device import is_on_device, without_modes
from ..stats.notable import slots_of_masks
from ..stats.tensor_stats import FLOATS
from .names import inputs_of
from .roots import ModuleInfo
from .rows import RecordedRow, RowWriter

_NEGINF = int(NonFinite.NEGINF)
_CLOSED = int(RowMark.CLOSED)
_MOST_PAGES = 64
"""Pages with -inf that are looked through for masks: a model's masks are all in its first batches."""
_MOST_CLOSED = 256


def closed_marked(row: RecordedRow, leaf: Any) -> RecordedRow:
    """The row of an argument, with `RowMark.CLOSED` if it is a mask in host memory with such a row.

    Called only for a call that has returned nan. Other rows are returned as they are.
    """
    if row.flags != _NEGINF or not isinstance(leaf, torch.Tensor) or is_on_device(leaf) or leaf.dim() == 0:
        return row
    if leaf.layout != torch.strided or leaf.is_nested or not bool((leaf.detach() == -math.inf).all(-1).any()):
        return row
    slot, value, shape, dtype, kind, mark = row.packed
    return row._replace(packed=(slot, value, shape, dtype, kind, mark | _CLOSED))


class ClosedMask(NamedTuple):
    """A mask that may be -inf throughout in a row."""

    page: int
    module: str
    role: str


class LateMasks:
    """The masks on a device."""

    def __init__(self, rows: RowWriter) -> None:
        self._rows = rows
        self._pages_left = _MOST_PAGES
        self._closed: dict[ClosedMask, None] = {}
        self.slots: set[int] = set()
        """Of arguments that have held -inf and nothing else that is not finite."""

    def learn(self, own: OwnPages, page: OpenPage) -> None:
        """Numbers of a page have come, and some are not finite: its masks are looked at from now on."""
        if self._pages_left:
            self._pages_left -= 1
            self.slots |= slots_of_masks(own, page, self._rows.argument_slots)

    def look(self, info: ModuleInfo, page: OpenPage, args: Any, kwargs: Any) -> None:
        """Start to read whether a mask that a call was handed has such a row. Waits for nothing."""
        roles = {role for role, slot in info.slots.items() if slot in self.slots}
        for role, leaf in inputs_of(args, kwargs) if roles else ():
            if role in roles and type(leaf) is torch.Tensor and is_on_device(leaf) and _has_rows(leaf):
                without_modes(self._read, leaf, ClosedMask(page.number, info.name, role))

    def _read(self, mask: torch.Tensor, about: ClosedMask) -> None:
        readings = self._rows.passed_on(mask.device)
        if readings is None or self._rows.is_capturing:
            return
        try:
            readings.read([mask.detach().amax(-1).amin()], about)
        except Exception:
            self.slots, self._pages_left = set(), 0  # one error is enough: no mask is looked at from now on
            raise

    def note(self, closed: ClosedMask) -> None:
        """One of its rows is -inf throughout."""
        if len(self._closed) >= _MOST_CLOSED:
            del self._closed[next(iter(self._closed))]
        self._closed[closed] = None

    def closed_in(self, page: int, module: str) -> list[str]:
        """The roles of such masks that the calls of a module in a page were handed."""
        return [each.role for each in self._closed if (each.page, each.module) == (page, module)]


def _has_rows(mask: torch.Tensor) -> bool:
    is_plain = mask.layout is torch.strided and not mask.is_nested
    return is_plain and mask.dtype in FLOATS and mask.itemsize > 1 and mask.dim() > 0 and mask.numel() > 0
