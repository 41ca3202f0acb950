"""Which autograd nodes each module call of one forward made: torch numbers its nodes in the order of creation.

    call of `norm`     nodes 4 to 5     NativeLayerNormBackward0
    call of `block`    nodes 4 to 9     ..., AddBackward0: the block's own code

Each call records two integers. The graph itself is read only after an alarm.
"""

from __future__ import annotations

import re
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from ...core.signal_errors import from_outside
from ...core.torch_names import name_in_torch
from ..device.device import without_modes
from .plain_tensor import version_of
from .roots import ModuleInfo

next_node: Callable[[], int] = name_in_torch("torch.autograd._get_sequence_nr", lambda: 0)
"""The number that the next node of this thread gets: each thread counts its own (torch/csrc/autograd/node.h)."""


MOST_NODES = 200_000
"""The most nodes of a graph that are read."""


def shapes_of(node: Any) -> list[tuple[int, ...]]:
    """The shapes of all that a node returned, as far as torch tells."""
    return [tuple(returned.shape) for returned in getattr(node, "_input_metadata", ())]


class NodesOfCall(NamedTuple):
    """A module call and the numbers of its nodes: from `first` up to, and without, `end`."""

    info: ModuleInfo
    first: int
    end: int


class GraphCalls:
    """The calls of one root call, in the order in which they returned."""

    __slots__ = ("_begins", "_innermost", "calls", "page", "skipped")

    def __init__(self, page: int, *, skipped: bool = False) -> None:
        self.page = page
        """Number of the page that has their frames."""
        self.skipped = skipped
        """Of a skipped batch: only the root's own call is here."""
        self.calls: list[tuple[ModuleInfo, int, int]] = []
        """As in NodesOfCall. Plain tuples: one is made for every module call."""
        self._begins: list[int] = []
        self._innermost: list[NodesOfCall | None] = []

    def innermost(self, number: int) -> NodesOfCall | None:
        """The innermost call that has made a node; None if none of them has. All calls must have returned."""
        if not self._begins:
            self._lay_out()
        place = bisect_right(self._begins, number) - 1
        return self._innermost[place] if place >= 0 else None

    def _lay_out(self) -> None:
        """From which number on which call is the innermost one. Calls lie within each other or apart."""
        open_: list[NodesOfCall] = []
        made = [NodesOfCall(*call) for call in reversed(self.calls) if call[1] < call[2]]  # a parent before its child
        for call in [*sorted(made, key=lambda call: (call.first, -call.end)), None]:
            while open_ and (call is None or open_[-1].end <= call.first):
                ended = open_.pop()
                self._begins.append(ended.end)
                self._innermost.append(open_[-1] if open_ else None)
            if call is not None:
                self._begins.append(call.first)
                self._innermost.append(call)
                open_.append(call)


class ReturnedOutputs(NamedTuple):
    """What the call of a root has returned, and the numbers of its nodes: from `first` up to, and without, `end`."""

    first: int
    end: int
    outputs: list[tuple[weakref.ref[torch.Tensor], int]]
    """(a tensor, how often it had been changed in place then)."""


class AutogradGraph(NamedTuple):
    """A graph that a backward runs through."""

    roots: tuple[Any, ...]
    """The nodes at which the backward has begun."""
    calls: GraphCalls
    within: Any = None
    """The node whose own backward began this one: the node of a reentrant activation checkpoint."""
    kept: bool = False
    """The backward leaves it as it is, or a part of it: the script may go back through it again."""
    losses: tuple[Callable[[], torch.Tensor | None], ...] = ()
    """Weak references to the tensors that the backward has begun from."""
    accumulates: bool = True
    """The script has called `backward`, and not `torch.autograd.grad`."""
    kept_loss: Any = None
    """A KeptLoss of explain/kept_loss.py, if its numbers arrive later from a device."""


_ENGINE = name_in_torch("torch.autograd.graph._engine_run_backward")
"""The function of torch that every backward runs in."""


def running_engine() -> FrameType | None:
    """The frame in which torch runs the backward that is running; None if there is none.

    On a device, hooks run in a thread of autograd's own, while the thread that has called it waits.
    """
    # this thread first: with nodes on the host it is the one that called `backward`
    frames = [sys._getframe(), *sys._current_frames().values()]
    code = getattr(_ENGINE, "__code__", None)
    try:
        return next(filter(None, (outwards(frame, lambda frame: frame.f_code is code) for frame in frames)), None)
    finally:
        del frames  # this one is among them, and would keep what they hold


def running_graph(calls: GraphCalls) -> AutogradGraph | None:
    """The graph of the backward that is running; None if it is not known."""
    engine, losses = running_engine(), []
    try:
        if engine is None:
            return None
        outputs = engine.f_locals.get("t_outputs", ())
        # _engine_run_backward(t_outputs, *args) of torch/autograd/graph.py: its locals are the only place that has the
        # roots
        losses = [each for each in outputs if getattr(each, "grad_fn", None) is not None]
        around = outwards(engine, _runs_a_backward)
        within = around.f_locals["ctx"] if around is not None else None
        kept = leaves_graph(engine.f_locals.get("args", (None, True)))
        roots, refs = tuple(each.grad_fn for each in losses), tuple(map(weakref.ref, losses))
        # `grad` says False (torch/autograd/__init__.py)
        accumulates = bool(engine.f_locals.get("kwargs", {}).get("accumulate_grad", True))
        return AutogradGraph(roots, calls, within, kept, refs, accumulates) if roots else None
    finally:
        engine = around = outputs = None
        losses = []


def leaves_graph(args: Sequence[Any]) -> bool:
    """Whether a backward leaves its graph, or a part of it, as it is.

    `args`: what torch's engine gets behind the outputs: (gradients, retain_graph, create_graph, inputs, ...). One with
    inputs goes through a part of the graph.
    """
    return any(map(bool, args[1:4]))


def _runs_a_backward(frame: FrameType) -> bool:
    return frame.f_code.co_name == "backward" and isinstance(frame.f_locals.get("ctx"), BackwardCFunction)


def outwards(start: FrameType, found: Callable[[FrameType], bool]) -> FrameType | None:
    """The innermost frame from `start` outwards that is `found`."""
    frame: FrameType | None = start
    while frame is not None and not found(frame):
        frame = frame.f_back
    return frame


# Whether a graph may be kept beyond its batch, until the numbers of its gradients have arrived from a device.
#
# A backward frees the tensors that its nodes have saved. Names, shapes and edges remain: about 1 kB a node. Three
# things would keep the script's memory alive while the next batch needs it, so a graph with one of them is dropped when
# that batch begins:
#
# - the script keeps the graph (retain_graph), or has gone back through a part of it: saved tensors are still there;
# - a torch.autograd.Function keeps more than plain numbers on its `ctx`: `ctx.x = x` is freed with the node;
# - a leaf is no parameter: a node holds the input of a reentrant checkpoint, or an input that has a gradient.
#
# Reading all nodes takes about a microsecond for each. A model is checked once, and again in one of 64 batches.

_AGAIN = 64
_MOST_KNOWN = 256
_TORCHS_OWN = re.compile(r"(\w+Backward\d*|AccumulateGrad|torch::autograd::(AccumulateGrad|CopySlices|CopyBackwards))")
"""Nodes of torch's own. Those of a custom operator in C++ may keep tensors that nobody can see."""
_PLAIN = (type(None), bool, int, float, complex, str, type, torch.dtype, torch.device, torch.layout, weakref.ref)


_MOST_RUNNING = 64
"""Each stretch that a reentrant checkpoint runs again has a graph of its own."""
_MOST_HELD = 4
"""Graphs of earlier batches whose numbers have not arrived: the host may be this many backwards ahead of the device."""


class GraphHold:
    """The graphs of a rank's backwards, the latest first, and which of them may be kept."""

    def __init__(self) -> None:
        self.running: list[AutogradGraph] = []
        """Those of the backward that is running."""
        self.held: list[AutogradGraph] = []
        """Those of backwards that have ended and whose numbers have not arrived."""
        self._known: dict[tuple[int, int], tuple[bool, int]] = {}
        """(calls, roots) of a graph -> (whether it may be kept, for how many more graphs like it)."""

    def of(self, page: int) -> list[AutogradGraph]:
        """Those of the page of this number."""
        return [graph for graph in (*self.running, *self.held) if graph.calls.page == page]

    def begins(self, calls: GraphCalls) -> AutogradGraph | None:
        """A backward has reached these calls. Its graph, if it is known to be no part of another one."""
        # a root may have several outputs, and so this is called several times in one backward: frames are walked once
        graph = running_graph(calls) if not any(graph.calls is calls for graph in self.running) else None
        if graph is None:
            return None
        self.running = [graph, *self.running[: _MOST_RUNNING - 1]]
        return graph if graph.within is None else None

    def is_new(self, graph: AutogradGraph) -> bool:
        """Whether the running backward has reached no other root before the one of this graph, its latest."""
        return all(known.roots != graph.roots for known in self.running if known is not graph)

    def keep(self, loss: Any) -> None:
        """The latest graph begins with this KeptLoss."""
        self.running[0] = self.running[0]._replace(kept_loss=loss)

    def ends(self, has_arrived: bool) -> None:
        """The backward has ended. Hold its graphs if its numbers have not arrived."""
        if not has_arrived:  # an alarm asks for them
            self.held = [*(graph for graph in self.running if not graph.kept), *self.held]
        self.running = []

    def release(self, waits_for: Callable[[int], bool]) -> None:
        """Let go of the graphs for which no number is outstanding. `waits_for` gets the number of a page."""
        if self.held:
            self.held = [graph for graph in self.held if waits_for(graph.calls.page)]

    def batch_begins(self, is_elsewhere: bool) -> None:
        """Let go of what may not be kept beyond its batch. `is_elsewhere`: on another stream, or in a capture."""
        self.running = []
        if self.held:
            # nodes that collect gradients would be used again, on the stream of the backward before: torch (2.14)
            # cannot capture that, not even later, if the script keeps the loss of this batch
            self.held = [] if is_elsewhere else [graph for graph in self.held if self.may_keep(graph)][:_MOST_HELD]

    def may_keep(self, graph: AutogradGraph) -> bool:
        """Whether a graph whose backward has ended holds nothing of the script's."""
        if graph.kept or graph.within is not None:
            return False
        key = len(graph.calls.calls), len(graph.roots)
        may, left = self._known.get(key, (False, 0))
        if not left:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            may, left = holds_nothing(graph.roots), _AGAIN
        self._known[key] = may, left - 1
        return may


def holds_nothing(roots: tuple[Any, ...]) -> bool:
    """Whether no node up to these roots keeps a tensor of the script's after its backward, as far as can be seen."""
    known = set(roots)
    left = list(roots)
    while left:
        node = left.pop()
        # of a torch.autograd.Function: the node is its `ctx`, and what a forward sets on that is in `vars`
        if isinstance(node, BackwardCFunction):
            if not all(map(_is_plain, vars(node).values())):
                return False
        elif not is_of_torch(node):
            return False
        if not isinstance(getattr(node, "variable", None), Parameter | None):
            return False
        for used, _ in node.next_functions:
            # None: that input needs no gradient
            if used is not None and used not in known:
                known.add(used)
                left.append(used)
        if len(known) > MOST_NODES:
            return False
    return True


def is_of_torch(node: Any) -> bool:
    """Whether a node is torch's own: neither a torch.autograd.Function nor that of a custom operator in C++."""
    return not isinstance(node, BackwardCFunction) and _TORCHS_OWN.fullmatch(node.name()) is not None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or type(value).__module__.startswith("torch.distributed.")


class _LeftGradient(NamedTuple):
    parameter: Callable[[], torch.Tensor | None]
    gradient: Callable[[], torch.Tensor | None]
    version: int
    extremes: tuple[torch.Tensor, torch.Tensor]
    """The smallest and the largest of it, on its device: nan if one element is."""

    @property
    def finite(self) -> bool:
        """Whether all of it was. Waits for the device."""
        return all(bool(each.isfinite()) for each in self.extremes)


class LeftGradients:
    """What was in `.grad` before the first backward that was watched, for parameters that had a gradient then.

    An earlier backward left it, or the script, or a notebook's cell that is run again. A backward adds to `.grad`: an
    old nan is in the sum, and looks as if that backward had made it. Each parameter's old gradient is checked once, on
    its own device and without waiting, when its module is called for the first time. The result counts if the backward
    found that very tensor, unchanged.
    """

    def __init__(self) -> None:
        self._left: list[_LeftGradient] = []
        self._found: dict[int, tuple[_LeftGradient, int]] = {}
        """id of a parameter -> (its entry, number of the page whose backward has found that gradient)."""

    def add(self, parameter: torch.Tensor) -> None:
        """A parameter is seen for the first time. Must not be called while a CUDA graph is captured."""
        gradient = parameter.grad
        if gradient is None or type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
            return  # of a shard of a DTensor, an operation may be a collective
        extremes = without_modes(_extremes, gradient)
        if extremes is not None:
            self._left.append(
                _LeftGradient(weakref.ref(parameter), weakref.ref(gradient), version_of(gradient), extremes)
            )

    def backward_begins(self, page: int) -> None:
        """A backward of the page of this number begins: each gradient that is still there is added to."""
        left, self._left = self._left, []
        for each in left:
            parameter, gradient = each.parameter(), each.gradient()
            if parameter is None or gradient is None:
                continue
            if parameter.grad is gradient and version_of(gradient) == each.version:
                self._found[id(parameter)] = each, page

    def was_bad(self, parameter: torch.Tensor, page: int) -> bool:
        """Whether the backward of this page has found a gradient that was not finite. Waits for the device."""
        found = self._found.get(id(parameter))
        return found is not None and found[0].parameter() is parameter and found[1] == page and not found[0].finite


def _extremes(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Without a temporary of the gradient's size; None for a tensor that torch has no such operation for."""
    try:
        # nan if one element is: aminmax propagates it (docs.pytorch.org/docs/stable/generated/torch.aminmax.html)
        smallest, largest = torch.aminmax(gradient)
    except (RuntimeError, TypeError) as error:  # it is empty, of 8 bits, or complex (from torch 2.15 on a TypeError)
        if from_outside(error):
            raise
        return None
    return smallest, largest
