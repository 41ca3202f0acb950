"""One graph that torch.compile made: the rows traced into it, and which of its places have been written."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._guards import CompileContext

from ...core.frames import ROW_KINDS
from ..record.names import wrapped_child
from ..record.roots import ModuleInfo
from .dynamo import (
    SEEN,
    current_output,
    forget,
    is_closed,
    is_for_compiled_autograd,
    is_for_inductor,
    is_lite,
    on_device,
    place_on,
    token,
    traced_method,
)
from .region_calls import RegionCalls
from .region_parts import RegionFrame, RegionGradient, RegionPolicy, RegionRow, RegionScope, is_a_backward


@dataclass
class _TracedRead:
    """A read in the graph that is being traced. `tensor` is the fake tensor that dynamo traces with."""

    nodes: list[torch.fx.Node]
    tensor: torch.Tensor
    version: int

    @property
    def is_unchanged(self) -> bool:
        """Whether the tensor has not been changed in place so far."""
        return self.tensor._version == self.version


class Region:
    """One graph. Several modules of a class may share it: each run of it is one of theirs."""

    def __init__(
        self, root: ModuleInfo, cls: str, owner: torch.nn.Module | None, opened: RegionScope, gradients: bool
    ) -> None:
        """`gradients`: whether those of its tensors are recorded."""
        self.with_gradients = gradients
        self.root = root
        self.cls = cls
        """Class of the first module that was entered."""
        self.stack: list[ModuleInfo] = []
        self.left = root
        """The last module that returned."""
        self.frames: list[RegionFrame] = []
        self.places: list[int] = []
        """Places of the forward."""
        self.gradients: list[RegionGradient] = []
        """Those of the backward, from its last to its first."""
        self._before: torch.fx.Node | None = None
        self.reads: dict[int, _TracedRead] = {}
        """place -> the read that writes it, while the graph is being traced."""
        self._place_of: dict[torch.fx.Node, int] = {}
        """Node of a tensor -> the place that its last read writes."""
        self._deferred: list[_TracedRead] = []
        """Reads of the last module that returned."""
        self._output: Callable[[], Any] = lambda: None
        """The trace that this is of, as long as dynamo keeps it."""
        self._version = 0
        self._is_unseen = opened is RegionScope.UNSEEN
        self._versions_of_a_run = 1 if is_for_inductor() else 2
        self.has_missed_a_run = False
        """It has run more than once since the last look: only the last run's numbers are there."""
        self._ran = False
        self._is_sorted = False
        self._skipped = False
        self.runs = RegionCalls(root, owner, opened, self.frames, self.gradients)

    @property
    def has_run(self) -> bool:
        """Whether its graph has run. The graph of an abandoned trace never does."""
        return self._ran or self.is_written

    @property
    def is_written(self) -> bool:
        """Whether the forward has written its numbers since the last `moved`."""
        if not self.places:
            return False
        buffer = on_device(self.places[0])
        if buffer is None:
            return SEEN[self.places[0]] is not None
        return int(buffer._version) != self._version  # each write of the graph raises the buffer's version

    def has_read(self, place: int) -> bool:
        """Whether the graph reads the tensor with this place, and has not changed it since."""
        read = self.reads.get(place)
        return place in self.places and (read is None or read.is_unchanged)

    def traced_in(self, output: Any) -> None:
        """A module is entered in the trace that dynamo makes `output` of. It is a new one if the last was discarded."""
        if output is self._output():
            return
        self._output = weakref.ref(output)
        for every in (self.stack, self.frames, self.places, self.gradients):
            every.clear()
        self.reads.clear()
        self._place_of.clear()
        self._is_sorted = False
        self.runs.forget()
        self._deferred.clear()

    def entered(self, info: ModuleInfo, module: torch.nn.Module) -> None:
        """A module is entered in the trace."""
        self.stack.append(info)
        self.runs.entered(info, module)

    def move_deferred_reads(self, graph: torch.fx.Graph | None) -> None:
        """A module has returned: move the reads of the previous one to the end of the graph.

        The operations between the two returns then come before the reads. Otherwise AOTAutograd keeps their results
        for the backward instead of recomputing them: a third more memory for the activations of a GPT-2 (torch 2.13).
        The read of a tensor that was changed in place in between is not moved.
        """
        reads, self._deferred = self._deferred, []
        for read in reads:
            for node in read.nodes if read.is_unchanged else ():
                last = _last_of(graph)
                if last is not None and last is not node and node.graph is graph and not node._erased:
                    last.append(node)

    def read_begins(self, graph: torch.fx.Graph | None) -> None:
        """The nodes that are traced from here on are a read."""
        self._before = _last_of(graph)

    def place_of_detached(self, graph: torch.fx.Graph | None) -> int:
        """The place of an earlier read of the tensor that was just detached; -1 if none, or if it has changed since."""
        last = _last_of(graph)
        place = self._place_of.get(last.args[0], -1) if last is not None else -1  # type: ignore[arg-type]  # no Node: not found
        return place if place >= 0 and self.reads[place].is_unchanged else -1

    def read_ends(self, graph: torch.fx.Graph | None, place: int) -> None:
        """The nodes since `read_begins` are the read that writes `place`."""
        if graph is None or self._before is None or self._before.graph is not graph:
            return
        nodes = list(itertools.takewhile(lambda node: node is not self._before, reversed(graph.nodes)))[::-1]
        tensor = nodes[0].args[0].meta.get("example_value") if nodes else None  # the tensor that was detached
        if isinstance(tensor, torch.Tensor):
            self.reads[place] = _TracedRead(nodes, tensor, tensor._version)
            self._deferred.append(self.reads[place])
            self._place_of[nodes[0].args[0]] = place

    def moved(self) -> bool:
        """Whether the forward has run since the last call. The gradients of a new batch then follow."""
        moved = self.is_written
        if moved:
            self._ran = True
            buffer = on_device(self.places[0])
            written = buffer if buffer is not None else token(self.places[0])
            versions = int(written._version) - self._version
            self.has_missed_a_run = self._is_unseen and versions > self._versions_of_a_run
            self._version += versions
            if self._skipped:  # the gradients so far are those of the skipped batch
                forget([gradient.place for gradient in self.gradients])
            self._skipped = False
            self.reads.clear()  # tracing has ended
            self._place_of.clear()
            if not self._is_sorted:
                self.gradients.sort(key=lambda gradient: gradient.node)  # a module may return an old tensor
                self._is_sorted = True
            self.runs.ran()
        return moved

    def forget(self) -> None:
        """Discard the numbers of the forward: they have been recorded."""
        forget(self.places)

    def skip(self) -> None:
        """The batch is skipped, including its backward, which may still be to come."""
        self.runs.batch_skipped()
        self._skipped = True


def _last_of(graph: torch.fx.Graph | None) -> torch.fx.Node | None:
    return next(iter(reversed(graph.nodes)), None) if graph is not None else None


# All graphs of a rank: which of them are recorded, and the rows of the one that is being traced.


@dataclass(eq=False, repr=False)
class RankRegions:
    """All graphs of a rank. One instance is current at a time, set by `attach`: the traced functions use it."""

    current: ClassVar[RankRegions | None] = None
    _policy: RegionPolicy
    _gradients: bool
    _fault: Callable[[str, Exception], None]
    _unseen: Callable[[], None] | None = None
    """Called when a graph is recorded whose gradients this torch does not let us see."""
    _first: Callable[[], None] | None = None
    """Called when a graph is recorded while there is none."""

    def __post_init__(self) -> None:
        self._by_compile: dict[Any, Region | None] = {}
        self._opening: tuple[Any, str] | None = None
        self._owner: torch.nn.Module | None = None
        self._opened = RegionScope.NO
        """For the graph that is being opened: the module whose method was compiled, and how the graph is recorded."""
        self._owners: dict[types.CodeType | None, Callable[[], torch.nn.Module | None]] = {}
        """Code of a method -> the last module that dynamo has traced it for."""
        self.regions: list[Region] = []

    def attach(self) -> None:
        """Record the graphs that are traced from now on here."""
        RankRegions.current = self

    def detach(self) -> None:
        """Stop recording. Traced graphs go on writing to their buffers, until dynamo sees that the hooks are gone."""
        if RankRegions.current is self:
            RankRegions.current = None

    # -- called while tracing; dynamo treats the result of every call as a constant -------------------------------

    def opens(self, cls: str, module: torch.nn.Module) -> bool:
        """A module is entered. False if this graph is not recorded."""
        if is_closed() or is_a_backward(cls):
            return False
        compile_id = CompileContext.current_compile_id()
        if compile_id in self._by_compile:
            return self._by_compile[compile_id] is not None or (compile_id, cls) == self._opening
        self._by_compile[compile_id] = None  # until its root is entered
        if is_lite():
            self._policy.may_not_open(cls)
            return False
        running = self._policy.innermost()
        # a wrapper's forward may be anybody's: that of torch.compile(part) is the part's, whose graphs others may share
        is_own = running is not None and wrapped_child(running) is None
        code, owner = traced_method(running if is_own else None)
        if owner is not None:
            self._owners[code] = weakref.ref(owner)
        elif code in self._owners:
            owner = self._owners[code]()
            owner = running if type(running) is type(owner) else owner
        opened = self._policy.may_open(module, self._knows(cls, owner), owner)
        if opened is RegionScope.NO:
            return False
        self._owner, self._opened = owner, opened
        self._opening = compile_id, cls
        return True

    def _knows(self, cls: str, owner: torch.nn.Module | None) -> bool:
        """Whether a new graph of this class would be indistinguishable from a known one, or one is made for each block.

        A module that is compiled again, for other shapes, has one more graph of its own. At a graph break, dynamo
        abandons the trace of the outer frames one by one, and traces the same modules from an inner frame. An abandoned
        trace is no graph, and the inner frame is not shared if one module alone runs it.
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
            info = self._policy.resolve(module, None)
            gradients = self._gradients and (self._opened is not RegionScope.UNSEEN or is_for_inductor())
            gradients = gradients and not is_for_compiled_autograd()
            region = Region(info, type(module).__name__, self._owner, self._opened, gradients)
            if self._gradients and not gradients:
                self._policy.not_looked_into(None, region.cls)
            if self._unseen is not None:
                self._unseen()
            self._owner = None
            self._by_compile[compile_id] = region
            if not self.regions and self._first is not None:
                self._first()
            self.regions.append(region)
        region.traced_in(current_output())
        region.entered(self._policy.resolve(module, region.stack[-1] if region.stack else region.root), module)
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
        """Record an error of gpuwatch itself, and drop the graph that is being traced."""
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
        region.frames[-1].rows.append(RegionRow(role, place, ROW_KINDS[kind], dtype))
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
