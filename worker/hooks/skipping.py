"""Which batches and which roots are recorded, and the few rows kept of a skipped batch."""

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

from ...core.errors import Code, coded
from ...core.events.own_limits import NotLookedInto, WatchChoice, choice_text
from ...core.frames import FramePhase, RowMark
from ...core.guest.tell import say
from ...core.recorder.layout import HeadField
from ..compile.region_parts import CompiledViews, RegionScope, is_a_backward
from ..device.device import without_modes
from ..record.frame_writer import FrameWriter
from ..record.names import class_of, outputs_of, unwrap
from ..record.roots import ModuleInfo, RootInfo
from ..record.rows import RecordedRow
from .global_hooks import RunningCalls

_SKIPPED = int(RowMark.SKIPPED)
_SHAPE_INFERENCE = ("_forward_metadata_inference", "_backward_metadata_inference")
"""Functions of torch.distributed.pipelining that run a module only to learn its shapes."""


@dataclass(eq=False, repr=False)
class BatchSkipping:
    """The skipped batches of one rank. `root` is a weak reference to a running root that is not recorded, else None."""

    _frames: FrameWriter
    only: InitVar[torch.nn.Module | None]
    """The model that is watched; None: all are."""

    def __post_init__(self, only: torch.nn.Module | None) -> None:
        self._progress, self._rows = self._frames.progress, self._frames.rows
        self._only = frozenset(map(id, only.modules())) if only is not None else None
        """Ids of the modules that may be roots; None: all."""
        self.classes = {class_of(part) for part in only.modules()} if only is not None else set()
        """Where not all modules may be roots: the classes of those that may, and of the modules in them."""
        settings = self._progress.settings
        self._every, self._traced = settings.every, [*settings.trace_batches, settings.explain]
        self._pace, self._rank = self._progress.pace, self._progress.rank
        self.first_root: int | None = None
        """Id of the first root that was called: the main one."""
        self.root: Callable[[], torch.nn.Module | None] | None = None
        self._infers_shapes = False
        """The skipped root runs for torch's shape inference and is not a batch."""

    # -- which ones ---------------------------------------------------------------------------------------------

    def is_watched(self, *modules: torch.nn.Module | None) -> bool:
        """Whether one of these may be a root."""
        return self._only is None or not self._only.isdisjoint(map(id, modules))

    def leaves_out(self, module: torch.nn.Module) -> bool:
        """Whether a call of this module outside of all others is no part of a batch."""
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
        return False

    def skips_again(self, module: torch.nn.Module) -> bool:
        """Whether a part of a batch that is run again, in its backward, is of a skipped batch."""
        if self._progress.skipped:
            self.root = weakref.ref(module)
        return self._progress.skipped

    def skips(self, module: torch.nn.Module, root: RootInfo, opens_batch: bool) -> bool:
        """A root is called. Whether its batch is skipped."""
        if self.first_root is None:
            self.first_root = root.id
        if opens_batch:
            root.batches += 1
        batch = max(0, root.batches - 1)
        if self._every != "auto":
            self._progress.skipped = batch not in self._traced and batch % self._every != 0
        elif opens_batch:
            self._keep_pace(root, batch)
        if not self._progress.skipped:
            return False
        self.root = weakref.ref(module)
        if opens_batch:
            self._progress.fields[HeadField.BATCHES_SKIPPED] += 1
            self._progress.fields[HeadField.BATCH] = root.batches - 1
        return True

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

    def ends(self, module: torch.nn.Module, output: Any) -> None:
        """Record only the output of the skipped root, which has returned."""
        self.root = None
        inferred_shapes, self._infers_shapes = self._infers_shapes, False
        if output is None or inferred_shapes:
            return
        with self._progress.faults.within("forward hook"), self._progress.lock:
            without_modes(self._record, module, output)

    def _record(self, module: torch.nn.Module, output: Any) -> None:
        """Write a frame of the root's output, unless all of it is known to be finite."""
        info, _ = self._frames.roots.enter(module)
        page = None
        rows: list[RecordedRow] = []
        for role, leaf in outputs_of(output):
            if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                continue
            if page is None:
                page = self._progress.begin_page(info.root)
                self._rows.begin_page(page.batch)
            rows.append(self._rows.leaf(info, role, leaf, _SKIPPED))
        if page is not None and any(row.flags or row.pending for row in rows):
            self._frames.put(page, info, FramePhase.FORWARD, rows)
        self._progress.recorder.pause_page()


def _is_shape_inference() -> bool:
    """Whether torch.distributed.pipelining (2.13) runs this forward to infer shapes, on uninitialized memory.

    It does so for a pipeline stage whose input shapes were not given.
    """
    if "torch.distributed.pipelining.stage" not in sys.modules:
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


# Which compiled regions are recorded, and which event records the others.


@dataclass(eq=False, repr=False)
class CompiledPolicy:
    """Which compiled regions of one rank are recorded."""

    _running: RunningCalls
    _skipping: BatchSkipping
    _frames: FrameWriter

    def __post_init__(self) -> None:
        self._roots, self._progress = self._frames.roots, self._frames.progress
        self._stack = self._running.stack
        self.around: set[str] = set()
        """Classes of modules whose forward runs compiled regions. The set stays the same."""
        self._not_looked_into: set[tuple[str, str, bool]] = set()
        """(module, class, whether a frame shows it) that run compiled code which no frame shows."""

    def may_open(self, first: torch.nn.Module, known: bool, owner: torch.nn.Module | None) -> RegionScope:
        """Whether a region that torch.compile traces is recorded, and which module its runs belong to (RegionScope).

        Modules of one class may share a graph, so something must tell of which of them a run is:

        - `owner`, the module whose method is compiled, is running, and hooks see its call: the run is its own.
        - No module but wrappers is running: it is recorded if no graph of this class is yet (`known`). The numbers of
          two could not be told apart.

        Else it is not recorded. `first`: the first module in the region.
        """
        self._progress.pace.watch_all()  # a graph has its readings in it, in every batch
        cls = class_of(first)
        inner = self._stack[-1] if self._stack else None
        if not self._skipping.is_running:
            if inner is None and not self._skipping.is_watched(first, owner):
                if cls in self._skipping.classes:  # those that are watched will share it
                    self.not_looked_into(None, cls)
                return RegionScope.NO
            if inner is not None and owner is not None and inner.ref() is owner:
                self.around.add(inner.cls)
                return RegionScope.BY_OWNER
            if not known and all(info.is_wrapper for info in self._stack):
                return RegionScope.ALONE if self._stack else RegionScope.UNSEEN
        self.may_not_open(cls)
        return RegionScope.NO

    def may_not_open(self, cls: str) -> None:
        """A compiled region is not recorded. Its first module is of this class."""
        self.not_looked_into(self._stack[-1] if self._stack else None, cls, self._skipping.is_running)

    def unseen(self, views: CompiledViews) -> None:
        """This torch does not let us see all of a graph."""
        self._progress.unseen_in_compiled(self._running.where(), views.missing, not views.rows)

    def not_looked_into(self, info: ModuleInfo | None, cls: str, is_shown: bool = False) -> None:
        """Record that no frame shows compiled code of this module, or, if the module is unknown, of this class.

        `is_shown`: whether a frame shows the module around code of an unknown one.
        """
        place = (info.name, info.cls, True) if info is not None else ("", cls, is_shown)
        if place not in self._not_looked_into:
            self._not_looked_into.add(place)
            self._progress.recorder.append(NotLookedInto(self._running.where(), *place))

    def innermost(self) -> torch.nn.Module | None:
        """The innermost module whose call hooks see."""
        return self._running.innermost()

    def resolve(self, module: torch.nn.Module, caller: ModuleInfo | None) -> ModuleInfo:
        """The info of a module that is being traced. `caller`: what calls it in the graph; None for the first one."""
        if self._stack:
            return self._roots.child(module, self._stack[0].root, self._stack[-1])
        if caller is not None:
            return self._roots.child(module, caller.root, caller)
        return self._roots.enter(module)[0]
