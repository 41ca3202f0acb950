"""Masks on a device, and whether a row of one is -inf throughout.

Softmax turns such a row into nan. On a device the mask is gone when the numbers arrive, so each call reads those of its
arguments that held -inf in an earlier batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...core.recorder.own_pages import OwnPages
from ...core.recorder.writer import OpenPage
from ..device.device import is_on_device, without_modes
from .float_formats import FLOATS
from .names import inputs_of
from .notable import slots_of_masks
from .plain_tensor import unwrapped
from .roots import ModuleInfo
from .rows import RowWriter

_MOST_PAGES = 64
"""Pages with -inf that are looked through for masks: a model's masks are all in its first batches."""
_MOST_CLOSED = 256


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
        """Slots of arguments whose only values that are not finite were -inf."""

    def learn(self, own: OwnPages, page: OpenPage) -> None:
        """Read this page's masks from now on: some of its numbers, which have arrived, are not finite."""
        if self._pages_left:
            self._pages_left -= 1
            self.slots |= slots_of_masks(own, page, self._rows.argument_slots)

    def read(self, info: ModuleInfo, page: OpenPage, args: Any, kwargs: Any) -> None:
        """Start to read whether a mask among a call's arguments has such a row. Does not wait."""
        roles = {role for role, slot in info.slots.items() if slot in self.slots}
        for role, leaf in inputs_of(args, kwargs) if roles else ():
            if role in roles and type(leaf) is torch.Tensor and is_on_device(leaf) and _has_rows(leaf):
                without_modes(self._read, leaf, ClosedMask(page.number, info.name, role))

    def _read(self, mask: torch.Tensor, about: ClosedMask) -> None:
        readings = self._rows.passed_on(mask.device)
        if readings is None or self._rows.is_capturing:
            return
        try:
            readings.read([unwrapped(mask).detach().amax(-1).amin()], about)
        except Exception:
            self.slots, self._pages_left = set(), 0  # after one error no mask is read any more
            raise

    def note(self, closed: ClosedMask) -> None:
        """One of its rows is -inf throughout."""
        if len(self._closed) >= _MOST_CLOSED:
            del self._closed[next(iter(self._closed))]
        self._closed[closed] = None

    def closed_in(self, page: int, module: str) -> list[str]:
        """The roles of such masks among the arguments of a module's calls in a page."""
        return [each.role for each in self._closed if (each.page, each.module) == (page, module)]


def _has_rows(mask: torch.Tensor) -> bool:
    is_plain = mask.layout is torch.strided and not mask.is_nested
    return is_plain and mask.dtype in FLOATS and mask.itemsize > 1 and mask.dim() > 0 and mask.numel() > 0
