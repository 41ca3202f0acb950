"""Rows from inside a region that torch.compile has made one graph of.

While dynamo traces a forward it traces the hooks, too. What they do there becomes a part of the graph: a look at each
output and at each input that no call of the region returned. Names, rows and their order are settled at the time of
tracing and cost nothing later. No state of Python is read or changed by the graph, so there is no break and no
recompilation.

    traced_before(module)                      -> the graph holds nothing of it
    traced_after(module, args, kwargs, output) -> in host memory: gpuwatch::look(x, token, 7)
                                                  on a device: place_7.copy_(stack(amin(x), amax(x), amin(abs(x))))

Seen with torch 2.13. A region is looked into when it is a whole model. The blocks of a model that are compiled one by
one share a graph, and rows inside it could not be told apart: of these only what goes in and comes out is seen.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import assume_constant_result, mark_static_address
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import CompileContext
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from ...core.frames import RowKind
from ..record.roots import ModuleInfo
from .graph_op import SEEN, new_place

NUMBERS = 3
"""Per buffer: smallest, largest, smallest absolute value, as float64."""
MARK = "_gpuwatch_place"
"""On a tensor that a call of the graph has returned: the place of its numbers. Taken off what leaves the graph.

What comes into the graph is never marked: a script may come again with the same tensor, and would find another graph.
"""


class _Buffers:
    """The tensors that graphs write to: the guards of a graph are about those that it uses, and no others.

    Attributes place_7, ... are numbers of tensors on a device, token_0, ... what `look` pretends to change.
    """


BUFFERS = _Buffers()


def on_device(place: int) -> torch.Tensor | None:
    """The buffer of a place whose tensor is on a device; None if it is in host memory, and the numbers in SEEN."""
    buffer: torch.Tensor | None = vars(BUFFERS).get(f"place_{place}")
    return buffer


@dataclass
class RegionRow:
    """A row of a traced frame: where its numbers are, place -1 if there are none."""

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
class _Traced:
    """A look in the graph that is being traced: what it looks at is the tensor without numbers that dynamo computes."""

    nodes: list[torch.fx.Node]
    tensor: torch.Tensor
    version: int

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing so far has changed the tensor in place."""
        return self.tensor._version == self.version


class Region:
    """One graph."""

    def __init__(self, root: ModuleInfo) -> None:
        self.root = root
        self.stack: list[ModuleInfo] = []
        self.left = root
        """The module that has returned last."""
        self.frames: list[RegionFrame] = []
        self.places: list[int] = []
        """Those of the forward."""
        self.gradients: list[int] = []
        """Those of the backward, in the order of the forward."""
        self.sources: list[tuple[RegionFrame, RegionRow]] = []
        """The row whose tensor each of them is the gradient of."""
        self.token = _new_token()
        self.gradient_token = _new_token()
        self._before: torch.fx.Node | None = None
        self.looks: dict[int, _Traced] = {}
        self._waiting: list[_Traced] = []
        self._version = 0
        self._next = -1
        self._skipped = False

    def begin_again(self) -> None:
        """Dynamo has thrown its first try away."""
        for every in (self.stack, self.frames, self.places, self.gradients, self.sources):
            every.clear()
        self.looks.clear()
        self._waiting.clear()

    def look_at_others(self, graph: torch.fx.Graph | None) -> None:
        """A module has returned. What was to be looked at when the one before it did, is looked at now.

        What is made of a tensor between the two calls then stands in front of the look. AOTAutograd does not compute
        again in the backward what stands behind somebody who reads the tensor as it lies, but keeps it: a third more
        memory for the activations of a GPT-2 (torch 2.13). What was changed in place in between was looked at before.
        """
        looks, self._waiting = self._waiting, []
        for look in looks:
            for node in look.nodes if look.is_unchanged else ():
                last = _last_of(graph)
                if last is not None and last is not node and node.graph is graph and not node._erased:
                    last.append(node)

    def look_begins(self, graph: torch.fx.Graph | None) -> None:
        """What is traced from here on is a look."""
        self._before = _last_of(graph)

    def look_ends(self, graph: torch.fx.Graph | None, place: int) -> None:
        """And up to here: that of `place`."""
        if graph is None or self._before is None or self._before.graph is not graph:
            return
        nodes = list(itertools.takewhile(lambda node: node is not self._before, reversed(graph.nodes)))[::-1]
        tensor = nodes[0].args[0].meta.get("example_value") if nodes else None  # what was detached
        if isinstance(tensor, torch.Tensor):
            self.looks[place] = _Traced(nodes, tensor, tensor._version)
            self._waiting.append(self.looks[place])

    def moved(self) -> bool:
        """Whether the forward has run since the last call. A new batch's gradients are then to come."""
        if not self.places:
            return False
        buffer = on_device(self.places[0])
        if buffer is None:
            moved = SEEN[self.places[0]] is not None
        else:  # the graph that writes to it counts that up
            before, self._version = self._version, int(buffer._version)
            moved = self._version != before
        if moved:
            if self._skipped:  # what there is by now is of the backward of the batch that was left out
                _forget(self.gradients)
            self._skipped = False
            self.looks.clear()  # nothing is traced any more
            self._next = len(self.gradients) - 1
        return moved

    def forget(self) -> None:
        """What the forward has seen was read."""
        _forget(self.places)

    def skip(self) -> None:
        """The batch is left out, with its backward, whether that has run or not."""
        self._next = -1
        self._skipped = True

    def new_gradients(self, all_of_them: bool, ran: bool) -> list[int]:
        """Positions in `gradients` that have been written since the last call, in the order of the backward.

        Cheap where nothing is new: a backward goes through them from the last to the first, so only the next few are
        looked at, unless all are asked for. Those of a device are not looked at at all, to wait for nothing: they
        count as written when the graph's backward is known to have run (`ran`), one time for each forward.
        """
        found: list[int] = []
        position = self._next
        missed = 0
        while position >= 0 and (all_of_them or missed < 8):
            place = self.gradients[position]
            if SEEN[place] is not None or (ran and on_device(place) is not None):
                found.append(position)
                missed = 0
                self._next = position - 1
            else:
                missed += 1
            position -= 1
        return found


def _forget(places: list[int]) -> None:
    for place in places:
        SEEN[place] = None


class Regions:
    """All graphs of a rank. There is one at a time: what is traced finds it through `attach`."""

    current: Regions | None = None

    def __init__(
        self,
        resolve: Callable[[torch.nn.Module, Region | None], ModuleInfo],
        may_open: Callable[[], bool],
        gradients: bool,
    ) -> None:
        self._resolve = resolve
        """The info of a module in a region; None for the region while it is being opened."""
        self._may_open = may_open
        """Whether nothing of a model runs outside of the region that is being traced."""
        self._gradients = gradients
        self._by_compile: dict[Any, Region | None] = {}
        self._opening: Any = None
        self._classes: set[str] = set()
        self.regions: list[Region] = []

    def attach(self) -> None:
        """From now on, what is traced is written down here."""
        Regions.current = self

    def detach(self) -> None:
        """Graphs that were traced go on writing to their buffers; nobody reads them."""
        if Regions.current is self:
            Regions.current = None

    # -- at the time of tracing; every call is seen by dynamo as a constant ---------------------------------------

    def opens(self, cls: str) -> bool:
        """A module is entered. False if this graph is not looked into."""
        if _is_closed():
            return False
        compile_id = CompileContext.current_compile_id()
        if compile_id in self._by_compile:
            return self._by_compile[compile_id] is not None or compile_id == self._opening
        if cls in self._classes or not self._may_open():
            self._by_compile[compile_id] = None
            return False
        self._by_compile[compile_id] = None  # until its root is entered
        self._classes.add(cls)
        self._opening = compile_id
        return True

    def enter(self, module_id: int) -> int:
        """A module is entered in a graph that is looked into."""
        module = ctypes.cast(module_id, ctypes.py_object).value
        compile_id = CompileContext.current_compile_id()
        region = self._by_compile.get(compile_id)
        if region is None:
            region = Region(self._resolve(module, None))
            self._by_compile[compile_id] = region
            self.regions.append(region)
        elif region.root.ref() is module and region.frames:
            region.begin_again()
        region.stack.append(self._resolve(module, region))
        return 0

    def leave(self, module_id: int) -> bool:
        """A module returns. False if this graph is not looked into."""
        region = self._by_compile.get(CompileContext.current_compile_id())
        if region is None or not region.stack:
            return False
        info = region.left = region.stack.pop()
        parent = region.stack[-1] if region.stack else None
        region.frames.append(RegionFrame(info, parent, len(region.stack)))
        return info.watched

    def row(self, role: str, place: int, kind: int, dtype: torch.dtype | None, device: str) -> int:
        """A row of the call that returns. The place of its numbers: a new one if it needs one (-2)."""
        region = self.region
        if place == -2:
            place = _place_on(device)
            region.places.append(place)
        region.frames[-1].rows.append(RegionRow(role, place, kind, dtype))
        return place

    def gradient(self, device: str) -> int:
        """The place for the gradient of the tensor of the last row."""
        region = self.region
        place = _place_on(device)
        region.gradients.append(place)
        region.sources.append((region.frames[-1], region.frames[-1].rows[-1]))
        return place

    @property
    def region(self) -> Region:
        """The one of the graph that is being traced."""
        region = self._by_compile[CompileContext.current_compile_id()]
        assert region is not None
        return region

    @property
    def gradients(self) -> bool:
        """Whether gradients of activations are looked at."""
        return self._gradients


def in_host_memory(device: str) -> bool:
    """Whether tensors there are looked at by the operator; else in the graph itself."""
    return device == "cpu"


def _place_on(device: str) -> int:
    place = new_place()
    if not in_host_memory(device):
        _keep(f"place_{place}", torch.zeros(NUMBERS, dtype=torch.float64, device=device))
    return place


def _new_token() -> str:
    return _keep(f"token_{len(vars(BUFFERS))}", torch.zeros(1))


def _keep(name: str, tensor: torch.Tensor) -> str:
    mark_static_address(tensor)
    setattr(BUFFERS, name, tensor)
    return name


def _is_closed() -> bool:
    """Whether what is traced now is handed to a function that takes functions, and may write to nothing of ours.

    Of `torch.func` (vmap has no rule for what writes), or an operator of higher order (`torch.cond`). The bodies of
    activation checkpoints are open: dynamo has them write.
    """
    if peek_interpreter_stack() is not None:
        return True
    tracer = _tracer()
    while tracer is not None and tracer.parent is not None:
        if tracer.source_target is not tag_activation_checkpoint:
            return True
        tracer = tracer.parent
    return False


def _tracer() -> Any:
    """What writes the graph that is being traced, or the body in it; None in a release of torch that hides it."""
    try:
        tracer = InstructionTranslator.current_tx().output.current_tracer
        return tracer if hasattr(tracer, "parent") and hasattr(tracer, "source_target") else None
    except AttributeError:
        return None


def _last_of(graph: torch.fx.Graph | None) -> torch.fx.Node | None:
    return next(iter(reversed(graph.nodes)), None) if graph is not None else None


def _graph() -> torch.fx.Graph | None:
    graph = getattr(_tracer(), "graph", None)
    return graph if isinstance(graph, torch.fx.Graph) else None


# What dynamo sees as constants. Each is called when the graph is traced, never when it runs.

C = TypeVar("C", bound=Callable[..., Any])


def _constant(call: C) -> C:
    return assume_constant_result(call)  # type: ignore[no-any-return, no-untyped-call]  # it returns what it is given


@_constant
def _opens(cls: str) -> bool:
    return Regions.current is not None and Regions.current.opens(cls)


@_constant
def _enter(module_id: int) -> int:
    return Regions.current.enter(module_id) if Regions.current is not None else 0


@_constant
def _leave(module_id: int) -> bool:
    return Regions.current is not None and Regions.current.leave(module_id)


@_constant
def _is_open() -> bool:
    current = Regions.current
    region = current._by_compile.get(CompileContext.current_compile_id()) if current is not None else None
    return region is not None and not _is_closed()


# These go by how dynamo keeps its graph. Where another release does so in another way, the looks stay where they are.


@_constant
def _look_at_others() -> int:
    with suppress(Exception):
        assert Regions.current is not None
        Regions.current.region.look_at_others(_graph())
    return 0


@_constant
def _look_begins() -> int:
    with suppress(Exception):
        assert Regions.current is not None
        Regions.current.region.look_begins(_graph())
    return 0


@_constant
def _look_ends(place: int) -> int:
    with suppress(Exception):
        assert Regions.current is not None
        Regions.current.region.look_ends(_graph(), place)
    return 0


@_constant
def _is_unchanged(place: int) -> bool:
    assert Regions.current is not None
    look = Regions.current.region.looks.get(place)
    return look is None or look.is_unchanged


@_constant
def _left_root() -> bool:
    current = Regions.current
    region = current._by_compile.get(CompileContext.current_compile_id()) if current is not None else None
    return region is not None and not region.left.name


@_constant
def _in_host_memory(device: str) -> bool:
    return in_host_memory(device)


@_constant
def _row(role: str, place: int, kind: int, dtype: Any, device: str) -> int:
    assert Regions.current is not None
    return Regions.current.row(role, place, kind, dtype, device)


@_constant
def _gradient(device: str) -> int:
    assert Regions.current is not None
    return Regions.current.gradient(device)


@_constant
def _token() -> str:
    assert Regions.current is not None
    return Regions.current.region.token


@_constant
def _gradient_token() -> str:
    assert Regions.current is not None
    return Regions.current.region.gradient_token


@_constant
def _wants_gradients() -> bool:
    return Regions.current is not None and Regions.current.gradients


# What dynamo traces.


def traced_before(module: torch.nn.Module) -> None:
    """A module is entered. Traced: only what dynamo knows well may stand here."""
    if _opens(type(module).__name__):
        _enter(id(module))


def traced_after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """A module returns. Traced."""
    if _is_open():
        if _leave(id(module)):
            _look_at_others()
            for position, value in enumerate(args):
                _look(value, f"input[{position}]", False, 0)
            for name, value in kwargs.items():
                _look(value, f"kwargs.{name}", False, 0)
            _look(output, "output", not any(value is output for value in args), 0)
        if _left_root():
            _unmark(output, 0)


def _look(value: Any, role: str, returned: bool, depth: int) -> None:
    if value is None:
        _row(role, -1, 1, None, "")
    elif type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        _look_at_tensor(value, role, returned)
    elif type(value) in (tuple, list) and depth < 3:
        for position, item in enumerate(value):
            _look(item, f"{role}[{position}]", returned, depth + 1)
    elif type(value) is dict and depth < 3:
        for key, item in value.items():
            if type(key) is str:
                _look(item, f"{role}.{key}", returned, depth + 1)
    else:
        _row(role, -1, 2, None, "")


def _unmark(value: Any, depth: int) -> None:
    if type(value) is torch.Tensor and getattr(value, MARK, -1) >= 0:
        setattr(value, MARK, -1)
    elif type(value) in (tuple, list) and depth < 3:
        for item in value:
            _unmark(item, depth + 1)
    elif type(value) is dict and depth < 3:
        for item in value.values():
            _unmark(item, depth + 1)


def _look_at_tensor(tensor: torch.Tensor, role: str, returned: bool) -> None:
    if not tensor.dtype.is_floating_point or tensor.numel() == 0 or tensor.layout is not torch.strided:
        _row(role, -1, 3, tensor.dtype, "")
        return
    known = getattr(tensor, MARK, -1)
    if known >= 0 and _is_unchanged(known):
        _row(role, known, 0, tensor.dtype, "")
        return
    device = str(tensor.device)
    place = _row(role, -2, 0, tensor.dtype, device)
    _look_begins()
    if _in_host_memory(device):
        torch.ops.gpuwatch.look(tensor.detach(), getattr(BUFFERS, _token()), place)
    else:
        getattr(BUFFERS, f"place_{place}").copy_(_numbers(tensor.detach()))
    _look_ends(place)
    if returned or known >= 0:
        setattr(tensor, MARK, place)
    if returned and tensor.requires_grad and _wants_gradients():
        gradient = _gradient(device)
        token = _gradient_token()

        def hook(grad: torch.Tensor) -> None:
            if _in_host_memory(device):
                torch.ops.gpuwatch.look(grad.detach(), getattr(BUFFERS, token), gradient)
            else:
                getattr(BUFFERS, f"place_{gradient}").copy_(_numbers(grad.detach()))

        tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has no annotation there


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor.amin(), tensor.amax(), tensor.abs().amin())).to(torch.float64)


assert (RowKind.NONE, RowKind.NOT_A_TENSOR, RowKind.NOT_MEASURABLE, RowKind.MEASURED) == (1, 2, 3, 0)
