"""Which compiled regions are recorded, and which event records the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.events.own_limits import NotLookedInto
from ..compile.region_parts import CompiledViews, RegionScope
from ..record.frame_writer import FrameWriter
from ..record.names import class_of
from ..record.roots import ModuleInfo
from .global_hooks import RunningCalls
from .skipping import BatchSkipping


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
