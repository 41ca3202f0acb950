"""One graph that torch.compile made: what is traced into it, and which of its places have been written."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..record.roots import ModuleInfo
from .attach import Opened
from .dynamo import is_for_inductor
from .graph_op import SEEN
from .places import forget, on_device, token
from .runs import Runs
from .traced_calls import RegionFrame, RegionGradient


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
    """One graph. Several modules of a class may share it: each run of it is one of theirs."""

    def __init__(
        self, root: ModuleInfo, cls: str, owner: torch.nn.Module | None, opened: Opened, gradients: bool
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
        self._output: Callable[[], Any] = _nothing
        """The trace that this is of, as long as dynamo keeps it."""
        self._version = 0
        self._is_unseen = opened is Opened.UNSEEN
        self._versions_of_a_run = 1 if is_for_inductor() else 2
        self.has_missed_a_run = False
        """It has run more than once since the last look: only the last run's numbers are there."""
        self._ran = False
        self._is_sorted = False
        self._skipped = False
        self.runs = Runs(root, owner, opened, self.frames, self.gradients)

    @property
    def has_run(self) -> bool:
        """Whether its graph has run. That of a trace that dynamo gave up never does."""
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
                self.gradients.sort(key=lambda gradient: gradient.node)  # a module may return what it made long before
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


def _nothing() -> None:
    return None


def _last_of(graph: torch.fx.Graph | None) -> torch.fx.Node | None:
    return next(iter(reversed(graph.nodes)), None) if graph is not None else None
