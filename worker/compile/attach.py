"""The functions that dynamo traces in place of the hooks, and what sets them: the compiled regions of a rank.

Also what keeps an old dynamo away from what the hooks call, what this torch lets us trace, and a graph that is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...core.frames import Phase
from ...core.recorder.layout import NOTHING
from ...core.recorder.writer import OpenPage
from ...core.signal_errors import from_outside
from ...core.torch_names import GRADIENTS_SINCE, NEWEST, ROWS_SINCE, not_seen_of_compiled, release_of
from ..patches import after_import
from ..record.judging import FrameWriter
from ..record.roots import ModuleInfo, RootInfo
from ..record.rows import RecordedRow

if TYPE_CHECKING:
    from .region_frames import RegionPages
    from .regions import RankRegions, Region
    from .untraced import UntracedGraphs


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


# Compiled regions, from the moment that the script imports torch._dynamo.
#
# gpuwatch does not import it first: that takes most of a second, and reads settings that the script may make later.


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


class CompiledRegions:
    """The compiled regions of a rank. Works without torch._dynamo too: there are no regions then."""

    def __init__(self, policy: RegionPolicy, frames: FrameWriter, gradients: GradientHooks) -> None:
        self._hooks: Iterable[Callable[..., Any]] = ()
        self._policy, self._frames, self._gradients = policy, frames, gradients
        self._rows, self._fault = frames.rows, frames.progress.faults.record
        self._attached = False
        self._give_up: Callable[[], None] = lambda: None
        """Waits no longer for torch._dynamo."""
        self._regions: RankRegions | UntracedGraphs | None = None
        self._pages: RegionPages | None = None

    def attach(self, hooks: Iterable[Callable[..., Any]] = ()) -> None:
        """Record the regions that are traced from now on. `hooks`: functions that dynamo must not compile."""
        self._hooks = hooks or self._hooks
        self._attached = True
        if self._regions is not None:
            self._regions.attach()
        else:
            self._give_up = after_import("torch._dynamo", self._begin)

    def detach(self) -> None:
        """Do not record the regions that are traced from now on."""
        self._attached = False
        self._give_up()
        if self._regions is not None:
            self._regions.detach()

    def _begin(self) -> None:
        global before, after
        if not self._attached:
            return
        try:
            self._begin_with(compiled_views())
        except Exception as error:  # of a name that torch does not have any more; the script's import goes on
            if from_outside(error):
                raise
            before = after = None
            self._fault("compiled modules", error)

    def _begin_with(self, views: CompiledViews) -> None:
        from .untraced import leave_alone

        leave_alone(self._hooks)
        if views.rows:
            self._trace_calls(views)
        else:
            self._trace_nothing(views)

    def _trace_nothing(self, views: CompiledViews) -> None:
        global before, after
        from .untraced import UntracedGraphs, untraced_before

        def entered(cls: str) -> None:
            self._policy.unseen(views)
            self._policy.may_not_open(cls)

        before, after = untraced_before, None
        self._regions = UntracedGraphs(entered, self._fault)
        self._regions.attach()

    def _trace_calls(self, views: CompiledViews) -> None:
        global before, after
        from .region_frames import RegionPages
        from .regions import RankRegions
        from .trace import traced_after, traced_before
        from .untraced import leave_alone

        before, after = traced_before, traced_after
        grads = "grads" in self._frames.progress.settings.watch
        without = (lambda: self._policy.unseen(views)) if grads and not views.gradients else None
        self._regions = RankRegions(self._policy, grads and views.gradients, self._fault, without)
        self._pages = RegionPages(self._regions, self._policy, self._frames, self._gradients)
        if grads:
            self._gradients.before_parameter = self._pages.take_gradients
            leave_alone((self._pages.take_gradients,))  # no Python function calls it: the compiled hooks do
        self._regions.attach()

    def take(
        self, under: ModuleInfo | None = None, parent: int = NOTHING, depth: int = 0, phase: Phase = Phase.FORWARD
    ) -> bool:
        """See `RegionPages.take`."""
        return self._pages is not None and self._pages.take(under, parent, depth, phase)

    def skip(self) -> None:
        """See `RegionPages.skip`."""
        if self._pages is not None:
            self._pages.skip()

    def discard(self) -> None:
        """See `RegionPages.discard`."""
        if self._pages is not None:
            self._pages.discard()

    def batch_ends(self, root: RootInfo) -> None:
        """See `RegionPages.batch_ends`."""
        if self._pages is not None:
            self._pages.batch_ends(root)

    def leaf(self, info: ModuleInfo, role: str, leaf: Any) -> RecordedRow:
        """See `RegionPages.leaf`."""
        return self._pages.leaf(info, role, leaf) if self._pages is not None else self._rows.leaf(info, role, leaf)

    def argument(self, info: ModuleInfo, role: str, leaf: Any) -> RecordedRow:
        """See `RegionPages.argument`."""
        reader = self._pages if self._pages is not None else self._rows
        return reader.argument(info, role, leaf)
