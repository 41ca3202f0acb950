"""Which batches and which roots are recorded."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from types import FrameType
from typing import Any

import torch
from msgspec.structs import replace

from ...core.codes import Code, coded
from ...core.events.own_limits import WatchChoice, choice_text
from ...core.guest.tell import say
from ...core.recorder.layout import HeadField
from ...core.text import joined
from ..compile.region_parts import is_a_backward
from ..record.frame_writer import FrameWriter
from ..record.names import class_of, parts_of, unwrap
from ..record.roots import ModuleInfo, RootInfo
from ..record.skipped_rows import SkippedRows

_TOLD_IN = 3
"""The batch of a root, counted from 1, in which it is told that no module matches: other roots were called by then."""
_MOST_NAMES = 3
_STAGES = "torch.distributed.pipelining.stage"
_SHAPE_INFERENCE = ("_forward_metadata_inference", "_backward_metadata_inference")
"""Functions of torch.distributed.pipelining that run a module only to learn its shapes."""


@dataclass(eq=False, repr=False)
class BatchSkipping:
    """The skipped batches of one rank. `root` is a weak reference to a running root that is not recorded, else None."""

    _frames: FrameWriter
    _kept: SkippedRows
    only: InitVar[torch.nn.Module | None]
    """The model that is watched; None: all are."""

    def __post_init__(self, only: torch.nn.Module | None) -> None:
        self._progress = self._frames.progress
        self._only = frozenset(map(id, parts_of(only))) if only is not None else None
        """Ids of the modules that may be roots; None: all."""
        self.classes = {class_of(part) for part in parts_of(only)} if only is not None else set()
        """Where not all modules may be roots: the classes of those that may, and of the modules in them."""
        settings = self._progress.settings
        self._patterns = list(settings.modules)
        """Empty once it was looked whether they match."""
        self._every, self._traced = settings.every, [*settings.trace_batches, settings.explain]
        self._pace, self._rank = self._progress.pace, self._progress.rank
        self._faults = self._progress.faults.within("forward hook")
        self.first_root: int | None = None
        """Id of the first root that was called: the main one."""
        self.root: Callable[[], torch.nn.Module | None] | None = None
        self._infers_shapes = False
        """The skipped root runs for torch's shape inference and is not a batch."""
        self._is_again = False
        """The skipped root is a part of a batch that runs again in its backward."""
        self._known: Callable[[], torch.nn.Module | None] = _nothing
        """The last module that was not left out."""
        self._info: ModuleInfo | None = None
        """Of the root that was skipped last."""

    # -- which ones ---------------------------------------------------------------------------------------------

    def is_watched(self, *modules: torch.nn.Module | None) -> bool:
        """Whether one of these may be a root."""
        return self._only is None or not self._only.isdisjoint(map(id, modules))

    def leaves_out(self, module: torch.nn.Module) -> bool:
        """Whether a call of this module outside of all others is no part of a batch."""
        if self._known() is module and _STAGES not in sys.modules:
            return False
        inner = unwrap(module)
        if not self.is_watched(inner):
            return True  # it may contain the watched model, as a loss module does
        if isinstance(inner, torch.fx.GraphModule) and is_a_backward(type(inner).__name__):
            return True
        made = isinstance(module, torch.fx.GraphModule) or type(module).__module__ == "torch._dynamo.utils"
        if made and _is_called_from("torch._functorch."):
            return True  # torch.compile made it from code that is recorded as a graph
        if _is_shape_inference():
            self.root, self._infers_shapes = weakref.ref(module), True
            return True
        if not made:
            self._known = weakref.ref(module)
        return False

    def skips_again(self, module: torch.nn.Module) -> bool:
        """Whether a part of a batch that is run again, in its backward, is of a skipped batch."""
        if self._progress.skipped:
            self.root, self._is_again = weakref.ref(module), True
        return self._progress.skipped

    def skips(self, module: torch.nn.Module, info: ModuleInfo, opens_batch: bool) -> bool:
        """A root is called. Whether its batch is skipped."""
        root = info.root
        if self.first_root is None:
            self.first_root = root.id
        if opens_batch:
            root.batches += 1
            if root.batches == _TOLD_IN and self._patterns:
                self._tell_if_unmatched(root)
        batch = max(0, root.batches - 1)
        if self._every != "auto":
            self._progress.skipped = batch not in self._traced and batch % self._every != 0
        elif opens_batch:
            self._keep_pace(root, batch)
        if not self._progress.skipped:
            return False
        self.root, self._info = weakref.ref(module), info
        if opens_batch:
            self._progress.fields[HeadField.BATCHES_SKIPPED] += 1
            self._progress.fields[HeadField.BATCH] = root.batches - 1
        return True

    def _tell_if_unmatched(self, root: RootInfo) -> None:
        """Say early that no pattern of `--modules` matches: the verdict of hours would be that nothing was watched."""
        progress = self._progress
        patterns, self._patterns = self._patterns, []
        if self._rank != 0 or progress.fields[HeadField.HAS_FRAMES]:
            return
        names = [f"`{info.name}`" for info in root.modules.values() if info.name][:_MOST_NAMES]
        given = joined([f"`{pattern}`" for pattern in patterns])
        text = f"no module that was called matches {given} (--modules): none is watched"
        text += f"; modules of {root.cls} are {', '.join(names)}" if names else ""
        say(coded(progress.in_users_words(text), Code.NOTHING_SELECTED))

    def _keep_pace(self, root: RootInfo, batch: int) -> None:
        """A batch of a root begins, with `--every auto`."""
        progress = self._progress
        if root.id == self.first_root:
            progress.look_for_forecasts()
            choice = self._pace.step_begins(progress.step, time.monotonic_ns())
            if choice is not None:
                where = replace(progress.where(root=root.label), batch=batch)
                event = WatchChoice(where, choice.every, choice.cost, choice.margin)
                progress.recorder.append(event)
                if self._rank == 0 and choice.every > 1:
                    say(coded(choice_text(event), Code.BATCHES_SKIPPED))
        progress.skipped = not self._pace.is_whole and batch not in self._traced

    # -- while one runs -----------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the module of a skipped batch runs, and lives."""
        return self.root is not None and self.root() is not None

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether `module` is called inside the skipped root.

        It is not if an interrupt ended that root's forward without its hook.
        """
        root = self.root() if self.root is not None else None
        # the root itself again: its last call was ended without `after`, as KeyboardInterrupt does (module_calls.py)
        if root is not None and root is not module:
            return True
        self.root = None
        return False

    def ends(self, module: torch.nn.Module, output: Any) -> ModuleInfo | None:
        """Record only the output of the skipped root, which has returned. None if it was no batch."""
        self.root = None
        is_none, self._infers_shapes, self._is_again = self._infers_shapes or self._is_again, False, False
        if output is None or is_none:
            return None
        with self._faults, self._progress.lock:
            info = self._info
            if info is None or info.ref() is not module:
                info = self._frames.roots.enter(module)[0]
            self._kept.of_output(info, output)
            return info
        return None


def _nothing() -> None:
    return None


def _is_shape_inference() -> bool:
    """Whether torch.distributed.pipelining (2.13) runs this forward to infer shapes, on uninitialized memory.

    It does so for a pipeline stage whose input shapes were not given.
    """
    if _STAGES not in sys.modules:
        return False
    return _is_called_from("torch.distributed.", _SHAPE_INFERENCE)


def _is_called_from(package: str, functions: tuple[str, ...] = ()) -> bool:
    """Whether a function of this package is running, one of `functions` if any are given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_one = not functions or frame.f_code.co_name in functions
        if is_one and frame.f_globals.get("__name__", "").startswith(package):
            return True
        frame = frame.f_back
    return False
