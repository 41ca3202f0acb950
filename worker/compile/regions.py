"""All graphs of a rank: which of them are recorded, and what is recorded of the one that is being traced."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import CompileContext

from ..record.names import wrapped_child
from ..record.roots import ModuleInfo
from .attach import Opened
from .dynamo import current_output, is_closed, is_for_inductor, traced_method
from .places import place_on
from .region import Region
from .traced_calls import RegionFrame, RegionGradient, RegionRow


class Regions:
    """All graphs of a rank. One instance is current at a time, set by `attach`: the traced functions use it."""

    current: Regions | None = None

    def __init__(
        self,
        resolve: Callable[[torch.nn.Module, Region | None], ModuleInfo],
        may_open: Callable[[torch.nn.Module, bool, torch.nn.Module | None], Opened],
        running: Callable[[], torch.nn.Module | None],
        not_looked_into: Callable[[ModuleInfo | None, str], None],
        gradients: bool,
        fault: Callable[[str, Exception], None],
        unseen: Callable[[], None] | None = None,
    ) -> None:
        """`unseen` is called when a graph is recorded whose gradients this torch does not let us see."""
        self._fault = fault
        self._unseen = unseen
        self._resolve = resolve
        """Returns the info of a module in a region. The region is None while it is being opened."""
        self._may_open = may_open
        """Given the first module in a graph, whether one of its class is known, and whose method the graph is of."""
        self._running = running
        """Returns the innermost module whose call hooks see."""
        self._not_looked_into = not_looked_into
        self._gradients = gradients
        self._by_compile: dict[Any, Region | None] = {}
        self._opening: tuple[Any, str] | None = None
        self._owner: torch.nn.Module | None = None
        self._opened = Opened.NO
        """Of the graph whose region is being opened: the module whose method it is, and how it is recorded."""
        self._owners: dict[types.CodeType | None, Callable[[], torch.nn.Module | None]] = {}
        """Code of a method -> the last module that dynamo has traced it for."""
        self.regions: list[Region] = []

    def attach(self) -> None:
        """Record the graphs that are traced from now on here."""
        Regions.current = self

    def detach(self) -> None:
        """Stop recording. Traced graphs go on writing to their buffers, until dynamo sees that the hooks are gone."""
        if Regions.current is self:
            Regions.current = None

    # -- called while tracing; dynamo treats the result of every call as a constant -------------------------------

    def opens(self, cls: str, module: torch.nn.Module) -> bool:
        """A module is entered. False if this graph is not recorded."""
        if is_closed():
            return False
        compile_id = CompileContext.current_compile_id()
        if compile_id in self._by_compile:
            return self._by_compile[compile_id] is not None or (compile_id, cls) == self._opening
        self._by_compile[compile_id] = None  # until its root is entered
        running = self._running()
        # a wrapper's forward may be anybody's: that of torch.compile(part) is the part's, whose graphs others may share
        is_own = running is not None and wrapped_child(running) is None
        code, owner = traced_method(running if is_own else None)
        if owner is not None:
            self._owners[code] = weakref.ref(owner)
        elif code in self._owners:
            owner = self._owners[code]()
            owner = running if type(running) is type(owner) else owner
        opened = self._may_open(module, self._knows(cls, owner), owner)
        if opened is Opened.NO:
            return False
        self._owner, self._opened = owner, opened
        self._opening = compile_id, cls
        return True

    def _knows(self, cls: str, owner: torch.nn.Module | None) -> bool:
        """Whether there is a graph of this class that one more could not be told from, or one is made for each block.

        A module that is compiled again, for other shapes, has one more graph of its own. Where a call breaks, dynamo
        gives up the trace of its outer frames one by one, and traces the same modules from an inner frame. What was
        given up is no graph, and the inner frame is not shared if one module alone runs it.
        """
        same = [region for region in self.regions if region.cls == cls]
        others = [region for region in same if region.has_run and not region.runs.is_of(owner)]
        return bool(others) or any(owner is None or not region.root.root.has_one(owner) for region in same)

    def enter(self, module: Any) -> int:
        """A module is entered in a graph that is recorded."""
        assert isinstance(module, torch.nn.Module)
        compile_id = CompileContext.current_compile_id()
        region = self._by_compile.get(compile_id)
        if region is None:
            info = self._resolve(module, None)
            gradients = self._gradients and (self._opened is not Opened.UNSEEN or is_for_inductor())
            region = Region(info, type(module).__name__, self._owner, self._opened, gradients)
            if self._gradients and not gradients:
                self._not_looked_into(None, region.cls)
            if self._unseen is not None:
                self._unseen()
            self._owner = None
            self._by_compile[compile_id] = region
            self.regions.append(region)
        region.traced_in(current_output())
        region.entered(self._resolve(module, region), module)
        return 0

    def leave(self) -> bool:
        """A module returns. False if this graph is not recorded."""
        region = self.traced
        if region is None or not region.stack:
            return False
        info = region.left = region.stack.pop()
        parent = region.stack[-1] if region.stack else None
        region.frames.append(RegionFrame(info, parent, len(region.stack)))
        return info.watched

    def give_up(self, error: Exception) -> None:
        """An error of gpuwatch itself: record it, and nothing of the graph that is being traced."""
        region = self.traced
        self._by_compile[CompileContext.current_compile_id()] = None
        if region is not None:
            self.regions.remove(region)
        self._fault("a compiled forward", error)

    def row(self, role: str, place: int, kind: int, dtype: torch.dtype | None, device: str) -> int:
        """Add a row to the frame of the returning call. Returns the place of its numbers; -2 asks for a new place."""
        region = self.region
        if place == -2:
            place = place_on(device)
            region.places.append(place)
        region.frames[-1].rows.append(RegionRow(role, place, kind, dtype))
        return place

    def gradient(self, device: str) -> int:
        """A new place for the gradient of the last row's tensor."""
        region = self.region
        frame = region.frames[-1]
        read = region.reads.get(frame.rows[-1].place)
        node = read.tensor.grad_fn if read is not None else None
        number = node._sequence_nr() if node is not None else 0
        region.gradients.append(RegionGradient(place_on(device), frame, frame.rows[-1], number))
        return region.gradients[-1].place

    @property
    def traced(self) -> Region | None:
        """The region that is being traced; None if this graph is not recorded."""
        return self._by_compile.get(CompileContext.current_compile_id())

    @property
    def region(self) -> Region:
        """The region that is being traced, where there is one."""
        region = self.traced
        assert region is not None
        return region
