"""The module calls that have begun and not returned, and the forward that they are part of."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch

from ...core.events import RunPosition
from ...core.frames import Phase
from ...core.recorder.layout import NOTHING, HeadField
from ..record.autograd_graph import GraphCalls
from ..record.progress import RunProgress
from ..record.roots import ModuleInfo

_this_thread = threading.get_ident
_LEFT_OUT = int(HeadField.CALLS_LEFT_OUT)
CALL = torch.nn.Module._call_impl.__code__
"""The code object of every module call. A stack frame with this code is a module call."""


class RunningCalls:
    """Those of a rank. They are of one thread: that of the root's call."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self.stack: list[ModuleInfo] = []
        """The outermost call first. The list stays the same."""
        self.depths: list[int] = []
        """Of each call on the stack, how many calls are around it that are no wrapper's. It may be longer."""
        self.thread = 0
        self.outer_exception: BaseException | None = None
        """What was being handled when the root was called."""
        self.phase = Phase.FORWARD
        self.nodes: GraphCalls | None = None
        """The autograd nodes of the calls of the root; None if no gradients are recorded."""
        self.page_with_threads = -1
        """Number of the last page in whose forward modules were called in another thread."""
        self._sharded: dict[int, bool] = {}
        """id of a root -> see `is_sharded`."""

    def begin(self, phase: Phase, nodes: GraphCalls | None) -> None:
        """A root is called."""
        self.phase, self.nodes = phase, nodes
        self.thread = _this_thread()
        self.outer_exception = sys.exc_info()[1]

    def where(self) -> RunPosition:
        """The place in the run, for an event."""
        return self._progress.where(root=self.stack[0].root.label if self.stack else None)

    def innermost(self) -> torch.nn.Module | None:
        """The module whose call began last."""
        return self.stack[-1].ref() if self.stack else None

    def parent(self) -> int:
        """The id of the module whose code made the last call: the nearest one around it that is not a wrapper."""
        stack = self.stack
        for position in range(len(stack) - 2, -1, -1):
            if not stack[position].is_wrapper:
                return stack[position].id
        return NOTHING

    def is_sharded(self) -> bool:
        """Whether FSDP gathers weights between the calls of the root. Those collectives write into no argument."""
        root = self.stack[0]
        known = self._sharded.get(root.root.id)
        if known is None:
            module = root.ref()
            parts = module.modules() if module is not None else ()
            classes = {cls.__name__ for part in parts for cls in type(part).__mro__}
            known = self._sharded[root.root.id] = bool(classes & {"FSDPModule", "FullyShardedDataParallel"})
        return known

    def drop_dead(self) -> None:
        """An interrupt, or somebody who has cleared torch's hooks, may have ended a forward without our hooks.

        Slow, and rarely needed.
        """
        if not self.stack:
            return
        innermost = self.stack[-1].ref()
        frame: FrameType | None = sys._current_frames().get(self.thread)
        while frame is not None:
            if frame.f_code is CALL and frame.f_locals.get("self") is innermost:
                return
            frame = frame.f_back
        self.stack.clear()

    def leave_out_thread(self) -> None:
        """A call in a second thread within one forward: it has no order relative to the first thread's calls."""
        page, fields = self._progress.recorder.page, self._progress.fields
        self.page_with_threads = page.number if page is not None else -1
        if not fields[_LEFT_OUT]:
            fields[HeadField.LEFT_OUT_PAGE] = self.page_with_threads
        fields[_LEFT_OUT] += 1
