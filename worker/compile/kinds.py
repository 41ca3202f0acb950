"""The calls of a graph that is being traced: their rows, and the gradients that the graph's backward makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import torch

from ..record.roots import ModuleInfo
from .views import CompiledViews

if TYPE_CHECKING:
    from .regions import Region


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
    """Hooks see the call of the module whose method was compiled: they know which module of a class runs the graph."""
    ALONE = auto()
    """Hooks see the calls of wrappers alone. It runs for the module that it was traced for."""
    UNSEEN = auto()
    """Hooks see no call around it: not when it begins, and so not that it runs twice before its backward."""


class RegionPolicy(Protocol):
    """What the hooks decide about compiled regions: hooks/skipping.py."""

    def resolve(self, module: torch.nn.Module, region: Region | None) -> ModuleInfo:
        """The info of a module that is being traced."""

    def may_open(self, first: torch.nn.Module, known: bool, owner: torch.nn.Module | None) -> RegionScope:
        """Given the first module in a graph, whether one of its class is known, and whose method the graph is of."""

    def may_not_open(self, cls: str) -> None:
        """Record that this torch does not let us see into a graph whose first module is of this class."""

    def innermost(self) -> torch.nn.Module | None:
        """The innermost module whose call hooks see."""

    def not_looked_into(self, info: ModuleInfo | None, cls: str) -> None:
        """Record that no frame shows this compiled code."""

    def unseen(self, views: CompiledViews) -> None:
        """This torch does not let us see all of a graph."""
