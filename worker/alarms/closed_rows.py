"""Whether a mask is -inf throughout in one of its rows: softmax makes nan of that. Read while the mask is alive."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...core.frames import Mark
from ...core.values import NonFinite
from ..record.rows import Row
from ..stats.device import is_on_device

_NEGINF = int(NonFinite.NEGINF)
_CLOSED = int(Mark.CLOSED)


def closed_marked(row: Row, leaf: Any) -> Row:
    """The row of an argument, with `Mark.CLOSED` if it is a mask in host memory with such a row.

    Called only for a call that has returned nan. Other rows are returned as they are.
    """
    if row.flags != _NEGINF or not isinstance(leaf, torch.Tensor) or is_on_device(leaf) or leaf.dim() == 0:
        return row
    if leaf.layout != torch.strided or leaf.is_nested or not bool((leaf.detach() == -math.inf).all(-1).any()):
        return row
    slot, value, shape, dtype, kind, mark = row.packed
    return row._replace(packed=(slot, value, shape, dtype, kind, mark | _CLOSED))
