"""What is known of a graph's calls while it is traced: their rows, and the gradients that its backward makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from ..record.roots import ModuleInfo


@dataclass
class RegionRow:
    """A row of a traced frame. `place` is that of its numbers, -1 if it has none."""

    role: str
    place: int
    kind: int
    dtype: torch.dtype | None


@dataclass
class RegionFrame:
    """A traced module call."""

    info: ModuleInfo
    parent: ModuleInfo | None
    depth: int
    rows: list[RegionRow] = field(default_factory=list)


@dataclass
class RegionGradient:
    """A gradient that the graph's backward writes to `place`: that of the tensor in this row of this frame."""

    place: int
    frame: RegionFrame
    row: RegionRow
    node: int
    """Sequence number of the autograd node that made the tensor; 0 if it is not known. A backward goes from the highest
    to the lowest."""


class RegionScope(Enum):
    """Whether a graph is recorded."""

    NO = auto()
    BY_OWNER = auto()
    """Hooks see the call of the module whose method it is: they tell for which module of a class it runs."""
    ALONE = auto()
    """Hooks see the calls of wrappers alone. It runs for the module that it was traced for."""
    UNSEEN = auto()
    """Hooks see no call around it: not when it begins, and so not that it runs twice before its backward."""
