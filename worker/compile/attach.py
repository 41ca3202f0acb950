"""The functions that dynamo traces in place of the hooks, and what sets them: the compiled regions of a rank.

And a guard that keeps an old dynamo out of what the hooks call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from ...core.frames import FramePhase
from ...core.recorder.layout import NOTHING
from ...core.signal_errors import from_outside
from ..patches import after_import
from ..record.frame_writer import FrameWriter
from ..record.recorded_row import RecordedRow
from ..record.roots import ModuleInfo, RootInfo
from .region_parts import CompiledViews, GradientHooks, RegionPolicy, compiled_views, eval_frame

if TYPE_CHECKING:
    from .region_frames import RegionPages
    from .regions import RankRegions
    from .untraced import UntracedGraphs


_is_compiling = torch.compiler.is_compiling

before: Callable[[Any], None] | None = None
after: Callable[[Any, Any, Any, Any], None] | None = None
backward: Callable[[], object] | None = None
"""Called while compiled autograd makes a graph of a whole backward. Its result is treated as a constant."""


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


# Compiled regions, from the moment that the script imports torch._dynamo.
#
# gpuwatch does not import it first: that takes most of a second, and reads settings that the script may make later.


class CompiledRegions:
    """The compiled regions of a rank. Works without torch._dynamo too: there are no regions then."""

    def __init__(self, policy: RegionPolicy, frames: FrameWriter, gradients: GradientHooks) -> None:
        self._hooks: Iterable[Callable[..., Any]] = ()
        self._around: Iterable[Callable[..., Any]] = ()
        self._policy, self._frames, self._gradients = policy, frames, gradients
        self._rows, self._fault = frames.rows, frames.progress.faults.record
        self._attached = False
        self._give_up: Callable[[], None] = lambda: None
        """Waits no longer for torch._dynamo."""
        self._regions: RankRegions | UntracedGraphs | None = None
        self._pages: RegionPages | None = None

    def attach(self, hooks: Iterable[Callable[..., Any]] = (), around: Iterable[Callable[..., Any]] = ()) -> None:
        """Record the regions that are traced from now on. `hooks`: functions that dynamo must not compile.

        `around`: likewise, while it may compile what they call.
        """
        self._hooks, self._around = hooks or self._hooks, around or self._around
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

        leave_alone(self._hooks, self._around)
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

        def first() -> None:
            # a script that compiles nothing pays no call for each gradient
            self._gradients.before_parameter = pages.record_gradients

        self._regions = RankRegions(
            self._policy, grads and views.gradients, self._fault, without, first if grads else None
        )
        self._pages = pages = RegionPages(self._regions, self._policy, self._frames, self._gradients)
        if grads:
            leave_alone((pages.record_gradients,))  # no Python function calls it: the compiled hooks do
        self._regions.attach()

    def record(
        self,
        under: ModuleInfo | None = None,
        parent: int = NOTHING,
        depth: int = 0,
        phase: FramePhase = FramePhase.FORWARD,
    ) -> bool:
        """See `RegionPages.record`."""
        return self._pages is not None and self._pages.record(under, parent, depth, phase)

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
