"""The parts of a compiled region that all files here share, and what this version of torch lets us trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import torch

from ...core.frames import RowKind
from ...core.recorder.writer import OpenPage
from ...core.torch_names import GRADIENTS_SINCE, NEWEST, ROWS_SINCE, not_seen_of_compiled, release_of
from ..record.roots import ModuleInfo

try:
    from torch._C._dynamo import eval_frame as eval_frame
except ImportError:  # only an old torch is asked for it
    eval_frame = None  # type: ignore[assignment]


def is_a_backward(cls: str) -> bool:
    """Whether this class is that of a graph that compiled autograd made of a backward."""
    return cls.startswith("CompiledAutograd")


# A graph that is being traced: its calls, their rows and gradients.


@dataclass
class RegionRow:
    """A row of a traced frame. `place` is that of its numbers, -1 if it has none."""

    role: str
    place: int
    kind: RowKind
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


# What each version of torch lets us trace into the graphs of torch.compile.
#
# Only code that is known to be harmless is traced:
#
#             rows  gradients
#     2.16                     not tried
#     2.15    yes   yes        the hook of a gradient may not change an input of the graph, so it writes through `.data`
#     2.13    yes   yes
#     2.11    yes              such a hook ends a run with an activation that works in place, or with dynamic shapes
#     2.8     yes              such a hook breaks the graph, unless autograd is compiled
#     2.7                      an attribute of a tensor breaks the graph
#
# tests/e2e/test_compiled_scripts.py runs the scripts that this table comes from, with the torch that is installed.

_THROUGH_DATA_SINCE = (2, 15)


@dataclass(frozen=True)
class CompiledViews:
    """What hooks trace into a graph, and so see of its modules."""

    rows: bool
    """Inputs and outputs of modules."""
    gradients: bool
    """Gradients of outputs. Those of parameters are read outside of graphs."""
    through_data: bool
    """The hook of a gradient writes through `.data`."""
    missing: str
    """One sentence about what hooks do not see; empty if they see all."""


def compiled_views(version: str = torch.__version__) -> CompiledViews:
    """What hooks can see of compiled modules with this version of torch."""
    release = release_of(version) or (0, 0)
    rows = ROWS_SINCE <= release <= NEWEST
    lost = not_seen_of_compiled(release)
    missing = f"torch {release[0]}.{release[1]}: {lost}" if lost else ""
    return CompiledViews(rows, rows and release >= GRADIENTS_SINCE, rows and release >= _THROUGH_DATA_SINCE, missing)


class RegionPolicy(Protocol):
    """What the hooks decide about compiled regions: hooks/skipping.py."""

    def resolve(self, module: torch.nn.Module, caller: ModuleInfo | None) -> ModuleInfo:
        """The info of a module that is being traced. `caller`: what calls it in the graph; None for the first one."""

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


class GradientHooks(Protocol):
    """The hooks of the backward, as far as the frames of a compiled backward need them."""

    before_parameter: Callable[[ModuleInfo], None] | None
    """Called with the module before a parameter's gradient is recorded."""

    def watch_parameter(self, parameter: torch.Tensor, info: ModuleInfo, name: str) -> None:
        """Record this parameter's gradient."""

    def mark(self, page: OpenPage) -> int:
        """What is known of a gradient of this page's backward beside its numbers."""

    def has_run(self, page: int) -> bool:
        """Whether a backward of this page has been seen."""
