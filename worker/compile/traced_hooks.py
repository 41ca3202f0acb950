"""The functions that dynamo traces in place of the hooks, which do nothing until attach.py sets them.

And what keeps an old dynamo away from what the hooks call, what this torch lets us trace, and a graph that is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...core.torch_names import GRADIENTS_SINCE, NEWEST, ROWS_SINCE, not_seen_of_compiled, release_of
from ..record.roots import ModuleInfo

if TYPE_CHECKING:
    from .regions import Region


try:
    from torch._C._dynamo import eval_frame
except ImportError:  # only an old torch is asked for it
    eval_frame = None  # type: ignore[assignment]

_is_compiling = torch.compiler.is_compiling

before: Callable[[Any], None] | None = None
after: Callable[[Any, Any, Any, Any], None] | None = None
backward: Callable[[], object] | None = None
"""Called while compiled autograd makes a graph of a whole backward. Its result is treated as a constant."""


def is_a_backward(cls: str) -> bool:
    """Whether this class is that of a graph that compiled autograd made of a backward."""
    return cls.startswith("CompiledAutograd")


def in_a_backward(hook: Any, gradient: Any) -> None:
    """Traced by compiled autograd in place of a gradient's hook. It adds no operation to the graph.

    Such a hook cannot record anything there, and a call that dynamo cannot trace would break the graph.
    """
    if backward is not None:
        backward()


def apart_from_dynamo(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook in whose calls dynamo compiles nothing. Since torch 2.7 it is the hook itself, which torch can skip.

    torch 2.5 and 2.6 skip a code object, but not the functions that it calls.
    """
    if eval_frame is None or hasattr(eval_frame, "set_code_exec_strategy"):
        return hook

    def apart(*args: Any) -> Any:
        if _is_compiling():
            return hook(*args)
        before = eval_frame.set_eval_frame(None)
        try:
            return hook(*args)
        finally:
            eval_frame.set_eval_frame(before)

    return apart


# A graph that is being traced: its calls, their rows and gradients.


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
