"""A row as it is recorded, before its frame is written."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...core.frames import RowMark
from ...core.recorder.writer import RowTuple
from ...core.values import PENDING, NonFinite
from ..device.device import is_on_device
from .plain_tensor import is_foreign, unwrapped

_NEGINF, _CLOSED = int(NonFinite.NEGINF), int(RowMark.CLOSED)


class RecordedRow(NamedTuple):
    """A row as it is recorded. The numbers of a tensor on a device arrive later: until then `meta` is PENDING."""

    packed: RowTuple
    flags: int
    fresh: bool
    """The tensor was read for this row, not for an earlier one of the page."""
    high: int = 0
    meta: int = 0
    notable: bool = False
    """Its frame must be judged."""

    @property
    def pending(self) -> bool:
        """Its numbers have not arrived from the device."""
        return self.meta == PENDING


def closed_marked(row: RecordedRow, leaf: Any) -> RecordedRow:
    """The row of an argument, with `RowMark.CLOSED` if it is a mask in host memory that is -inf throughout in one row.

    Softmax makes nan of such a row. Called only for a call that has returned nan. Other rows are returned as they are.
    """
    if row.flags != _NEGINF or not isinstance(leaf, torch.Tensor) or is_on_device(leaf) or leaf.dim() == 0:
        return row
    leaf = unwrapped(leaf)
    if is_foreign(type(leaf)) or leaf.layout != torch.strided or leaf.is_nested:
        return row
    if not bool((leaf.detach() == -math.inf).all(-1).any()):
        return row
    slot, value, shape, dtype, kind, mark = row.packed
    return row._replace(packed=(slot, value, shape, dtype, kind, mark | _CLOSED))
