"""Which compiled regions are recorded, and what is said of those that are not."""

from __future__ import annotations

from typing import Any

import torch

from ...core.events import CompiledUnseen, NotLookedInto
from ...core.tell import tell
from ..compile.kinds import RegionScope
from ..compile.views import CompiledViews
from ..record.names import class_of
from ..record.progress import RunProgress
from ..record.roots import ModuleInfo, RankRoots
from .running_calls import RunningCalls
from .skipping import BatchSkipping


class CompiledPolicy:
    """Of one rank."""

    def __init__(self, running: RunningCalls, skipping: BatchSkipping, roots: RankRoots, progress: RunProgress) -> None:
        self._running = running
        self._stack = running.stack
        self._skipping = skipping
        self._roots = roots
        self._progress = progress
        self.around: set[str] = set()
        """Classes of modules whose forward runs compiled regions. The set stays the same."""
        self._not_looked_into: set[tuple[str, str, bool]] = set()
        """(module, class, whether a frame shows it) that run compiled code which no frame shows."""
        self._has_told_unseen = False

    def may_open(self, first: torch.nn.Module, known: bool, owner: torch.nn.Module | None) -> RegionScope:
        """Whether a compiled region is recorded: its `owner` is running, or no module outside of it is.

        `first` is the first module in it, and `owner` the one whose method is compiled. Others of its class may share
        the graph: the one that runs is the one whose graph it is. Wrappers do not count. `known`: a graph of this class
        is recorded already. The numbers of two that nothing outside tells apart could not be told apart.
        """
        cls = class_of(first)
        inner = self._stack[-1] if self._stack else None
        if not self._skipping.is_running:
            if inner is None and not self._skipping.is_watched(first, owner):
                if self._skipping.shares_class(cls):  # those that are watched will share it
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
        if self._stack or not self._skipping.is_running:
            self.not_looked_into(self._stack[-1] if self._stack else None, cls)
        else:
            self._note(("", cls, True))

    def unseen(self, views: CompiledViews) -> None:
        """This torch does not let us see all of a graph."""
        if not self._has_told_unseen:
            self._has_told_unseen = True
            self._progress.recorder.append(CompiledUnseen(self._running.where(), views.missing, not views.rows))
            if self._progress.rank == 0:
                tell(f"gpuwatch: {views.missing}")

    def not_looked_into(self, info: ModuleInfo | None, cls: str) -> None:
        """Compiled code was not looked into: inside of this module, or, where none is known, of this class."""
        self._note((info.name, info.cls, True) if info is not None else ("", cls, False))

    def _note(self, place: tuple[str, str, bool]) -> None:
        if place not in self._not_looked_into:
            self._not_looked_into.add(place)
            self._progress.recorder.append(NotLookedInto(self._running.where(), *place))

    def innermost(self) -> torch.nn.Module | None:
        """The innermost module whose call hooks see."""
        return self._running.innermost()

    def resolve(self, module: torch.nn.Module, region: Any) -> ModuleInfo:
        """The info of a module that is being traced. The region is None while it is being opened."""
        if self._stack:
            return self._roots.child(module, self._stack[0].root, self._stack[-1])
        if region is not None:
            return self._roots.child(module, region.root.root, region.stack[-1] if region.stack else region.root)
        return self._roots.enter(module)[0]
