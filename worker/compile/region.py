"""One graph that torch.compile made: its calls, their rows, and which of its places have been written."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..record.roots import ModuleInfo
from .graph_op import SEEN
from .places import on_device


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


@dataclass
class _TracedRead:
    """A read in the graph that is being traced. `tensor` is the fake tensor that dynamo traces with."""

    nodes: list[torch.fx.Node]
    tensor: torch.Tensor
    version: int

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing so far has changed the tensor in place."""
        return self.tensor._version == self.version


class Region:
    """One graph."""

    def __init__(self, root: ModuleInfo, cls: str, owner: torch.nn.Module | None) -> None:
        self._owner: Callable[[], torch.nn.Module | None] = weakref.ref(owner) if owner is not None else _nothing
        """The module whose method it is a graph of."""
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
        self._output: Callable[[], Any] = _nothing
        """The trace that this is of, as long as dynamo keeps it."""
        self._version = 0
        self._ran = False
        self._next = -1
        self._last_of: dict[int, int] = {}
        """Id of a module -> position of the last gradient of what it returns, in the order of the backward."""
        self._is_backward = False
        """The backward of a device has been seen to run, since the last forward."""
        self._skipped = False

    @property
    def has_run(self) -> bool:
        """Whether its graph has run. That of a trace that dynamo gave up never does."""
        return self._ran or self._is_written

    @property
    def _is_written(self) -> bool:
        """Whether the forward has written its numbers since the last `moved`."""
        if not self.places:
            return False
        buffer = on_device(self.places[0])
        if buffer is None:
            return SEEN[self.places[0]] is not None
        return int(buffer._version) != self._version  # each write of the graph raises the buffer's version

    def is_of(self, owner: torch.nn.Module | None) -> bool:
        """Whether it is a graph of a method of this module."""
        return owner is not None and self._owner() is owner

    def traced_in(self, output: Any) -> None:
        """A module is entered in the trace that dynamo makes `output` of. It is a new one if the last was discarded."""
        if output is self._output():
            return
        self._output = weakref.ref(output)
        for every in (self.stack, self.frames, self.places, self.gradients):
            every.clear()
        self.reads.clear()
        self._place_of.clear()
        self._last_of.clear()
        self._deferred.clear()

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
        """Where the tensor that has just been detached was read before; -1 if it was not, or has changed since."""
        last = _last_of(graph)
        place = self._place_of.get(last.args[0], -1) if last is not None else -1  # type: ignore[arg-type]  # no Node: not found
        return place if place >= 0 and self.reads[place].is_unchanged else -1

    def read_ends(self, graph: torch.fx.Graph | None, place: int) -> None:
        """The nodes since `read_begins` are the read that writes `place`."""
        if graph is None or self._before is None or self._before.graph is not graph:
            return
        nodes = list(itertools.takewhile(lambda node: node is not self._before, reversed(graph.nodes)))[::-1]
        tensor = nodes[0].args[0].meta.get("example_value") if nodes else None  # what was detached
        if isinstance(tensor, torch.Tensor):
            self.reads[place] = _TracedRead(nodes, tensor, tensor._version)
            self._deferred.append(self.reads[place])
            self._place_of[nodes[0].args[0]] = place

    def moved(self) -> bool:
        """Whether the forward has run since the last call. The gradients of a new batch then follow."""
        moved = self._is_written
        if moved:
            self._ran = True
            buffer = on_device(self.places[0])
            if buffer is not None:
                self._version = int(buffer._version)
            if self._skipped:  # the gradients so far are those of the skipped batch
                _forget([gradient.place for gradient in self.gradients])
            self._skipped = False
            self.reads.clear()  # tracing has ended
            self._place_of.clear()
            if not self._last_of:
                self.gradients.sort(key=lambda gradient: gradient.node)  # a module may return what it made long before
                self._last_of = {each.frame.info.id: at for at, each in reversed([*enumerate(self.gradients)])}
            self._next = len(self.gradients) - 1
            self._is_backward = False
        return moved

    def forget(self) -> None:
        """Discard the numbers of the forward: they have been recorded."""
        _forget(self.places)

    def skip(self) -> None:
        """The batch is skipped, including its backward, which may still be to come."""
        self._next = -1
        self._skipped = True

    def new_gradients(self, owner: ModuleInfo | None) -> list[int]:
        """Positions in `gradients` that have been written since the last call, in the order of the backward.

        A parameter of `owner` has just got its gradient, and a backward writes them from the last to the first, so only
        the next few are checked. None: the backward has ended, and all are. Those of a device are not checked, since
        that would wait for it: the backward has written all down to those of what `owner` returned. It may be several
        graphs, as DDP has it, or come after that of code that is not in the graph.
        """
        reached = self._last_of.get(owner.id) if owner is not None else 0 if self._is_backward else None
        found: list[int] = []
        position = self._next
        missed = 0
        while position >= 0 and (owner is None or missed < 8):
            place = self.gradients[position].place
            if on_device(place) is not None:
                is_written = reached is not None and position >= reached
                self._is_backward |= is_written
            else:
                is_written = SEEN[place] is not None
            if is_written:
                found.append(position)
                missed = 0
                self._next = position - 1
            else:
                missed += 1
            position -= 1
        return found


def _nothing() -> None:
    return None


def _forget(places: list[int]) -> None:
    for place in places:
        SEEN[place] = None


def _last_of(graph: torch.fx.Graph | None) -> torch.fx.Node | None:
    return next(iter(reversed(graph.nodes)), None) if graph is not None else None
