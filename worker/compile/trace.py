"""Rows from inside a region that torch.compile made one graph of.

While dynamo traces a forward it also traces the hooks. Their tensor operations become a part of the graph: they read
each output, and each input that no call of the region returned. Names, rows and their order are fixed while tracing and
cost nothing later. The graph reads and changes no Python state, so there is no graph break and no recompilation.

    traced_before(module)                      -> adds nothing to the graph
    traced_after(module, args, kwargs, output) -> in host memory: gpuwatch::look(x, token, 7)
                                                  on a device: place_7.copy_(stack(amin(x), amax(x), amin(abs(x))))

Tested with torch 2.13. A region is recorded when it is a whole model. The blocks of a model that are compiled one by
one share a graph, so their rows could not be told apart: only their inputs and outputs are recorded.
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
"""Numbers in a buffer: smallest, largest and smallest absolute value, as float64."""
MARK = "_gpuwatch_place"
"""Attribute of a tensor that a call of the graph returned: the place of its numbers. Removed from the graph's outputs.

Inputs of the graph are never marked: a script that passes the same tensor again would cause a recompilation.
"""


class _Buffers:
    """The tensors that graphs write to, one attribute each. A graph has guards only on those that it uses.

    place_7, ... hold the numbers of tensors on a device. token_0, ... are the tokens of `gpuwatch::look`.
    """


BUFFERS = _Buffers()


def on_device(place: int) -> torch.Tensor | None:
    """The buffer of a place whose tensor is on a device. None if it is in host memory: its numbers are in SEEN."""
    buffer: torch.Tensor | None = vars(BUFFERS).get(f"place_{place}")
    return buffer


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

    def __init__(self, root: ModuleInfo) -> None:
        self.root = root
        self.stack: list[ModuleInfo] = []
        self.left = root
        """The last module that returned."""
        self.frames: list[RegionFrame] = []
        self.places: list[int] = []
        """Places of the forward."""
        self.gradients: list[int] = []
        """Places of the backward, in the order of the forward."""
        self.sources: list[tuple[RegionFrame, RegionRow]] = []
        """For each place of the backward, the row of the tensor that has this gradient."""
        self.token = _new_token()
        self.gradient_token = _new_token()
        self._before: torch.fx.Node | None = None
        self.reads: dict[int, _TracedRead] = {}
        """place -> the read that writes it, while the graph is being traced."""
        self._deferred: list[_TracedRead] = []
        """Reads of the last module that returned."""
        self._version = 0
        self._next = -1
        self._skipped = False

    def begin_again(self) -> None:
        """Dynamo has discarded its first trace and begins again."""
        for every in (self.stack, self.frames, self.places, self.gradients, self.sources):
            every.clear()
        self.reads.clear()
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

    def read_ends(self, graph: torch.fx.Graph | None, place: int) -> None:
        """The nodes since `read_begins` are the read that writes `place`."""
        if graph is None or self._before is None or self._before.graph is not graph:
            return
        nodes = list(itertools.takewhile(lambda node: node is not self._before, reversed(graph.nodes)))[::-1]
        tensor = nodes[0].args[0].meta.get("example_value") if nodes else None  # what was detached
        if isinstance(tensor, torch.Tensor):
            self.reads[place] = _TracedRead(nodes, tensor, tensor._version)
            self._deferred.append(self.reads[place])

    def moved(self) -> bool:
        """Whether the forward has run since the last call. The gradients of a new batch then follow."""
        if not self.places:
            return False
        buffer = on_device(self.places[0])
        if buffer is None:
            moved = SEEN[self.places[0]] is not None
        else:  # each write of the graph raises the buffer's version
            before, self._version = self._version, int(buffer._version)
            moved = self._version != before
        if moved:
            if self._skipped:  # the gradients so far are those of the skipped batch
                _forget(self.gradients)
            self._skipped = False
            self.reads.clear()  # tracing has ended
            self._next = len(self.gradients) - 1
        return moved

    def forget(self) -> None:
        """Discard the numbers of the forward: they have been recorded."""
        _forget(self.places)

    def skip(self) -> None:
        """The batch is skipped, including its backward, which may still be to come."""
        self._next = -1
        self._skipped = True

    def new_gradients(self, all_of_them: bool, ran: bool) -> list[int]:
        """Positions in `gradients` that have been written since the last call, in the order of the backward.

        A backward writes them from the last to the first, so only the next few are checked, unless `all_of_them` is
        set. Those of a device are not checked, since that would wait for it. They count as written, once per forward,
        when the graph's backward is known to have run (`ran`).
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
    """All graphs of a rank. One instance is current at a time, set by `attach`: the traced functions use it."""

    current: Regions | None = None

    def __init__(
        self,
        resolve: Callable[[torch.nn.Module, Region | None], ModuleInfo],
        may_open: Callable[[str, bool], bool],
        gradients: bool,
    ) -> None:
        self._resolve = resolve
        """Returns the info of a module in a region. The region is None while it is being opened."""
        self._may_open = may_open
        """Given a class, and whether a graph of that class is known: whether a graph of it may be recorded."""
        self._gradients = gradients
        self._by_compile: dict[Any, Region | None] = {}
        self._opening: Any = None
        self._classes: set[str] = set()
        self.regions: list[Region] = []

    def attach(self) -> None:
        """Record the graphs that are traced from now on here."""
        Regions.current = self

    def detach(self) -> None:
        """Stop recording. Traced graphs go on writing to their buffers; nobody reads these."""
        if Regions.current is self:
            Regions.current = None

    # -- called while tracing; dynamo treats the result of every call as a constant -------------------------------

    def opens(self, cls: str) -> bool:
        """A module is entered. False if this graph is not recorded."""
        if _is_closed():
            return False
        compile_id = CompileContext.current_compile_id()
        if compile_id in self._by_compile:
            return self._by_compile[compile_id] is not None or compile_id == self._opening
        if not self._may_open(cls, cls in self._classes):
            self._by_compile[compile_id] = None
            return False
        self._by_compile[compile_id] = None  # until its root is entered
        self._classes.add(cls)
        self._opening = compile_id
        return True

    def enter(self, module_id: int) -> int:
        """A module is entered in a graph that is recorded."""
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
        """A module returns. False if this graph is not recorded."""
        region = self._by_compile.get(CompileContext.current_compile_id())
        if region is None or not region.stack:
            return False
        info = region.left = region.stack.pop()
        parent = region.stack[-1] if region.stack else None
        region.frames.append(RegionFrame(info, parent, len(region.stack)))
        return info.watched

    def row(self, role: str, place: int, kind: int, dtype: torch.dtype | None, device: str) -> int:
        """Add a row to the frame of the returning call. Returns the place of its numbers; -2 asks for a new place."""
        region = self.region
        if place == -2:
            place = _place_on(device)
            region.places.append(place)
        region.frames[-1].rows.append(RegionRow(role, place, kind, dtype))
        return place

    def gradient(self, device: str) -> int:
        """A new place for the gradient of the last row's tensor."""
        region = self.region
        place = _place_on(device)
        region.gradients.append(place)
        region.sources.append((region.frames[-1], region.frames[-1].rows[-1]))
        return place

    @property
    def region(self) -> Region:
        """The region that is being traced."""
        region = self._by_compile[CompileContext.current_compile_id()]
        assert region is not None
        return region

    @property
    def gradients(self) -> bool:
        """Whether gradients of activations are recorded."""
        return self._gradients


def in_host_memory(device: str) -> bool:
    """Whether tensors on `device` are read by `gpuwatch::look`. Others are reduced in the graph itself."""
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
    """Whether dynamo traces the body of a higher-order function, which must not write to our buffers.

    Such a function is one of `torch.func` (vmap has no rule for a write) or a higher-order operator (`torch.cond`).
    The body of an activation checkpoint is not closed: dynamo allows writes in it.
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
    """Dynamo's tracer of the current graph or body; None in a torch version without this attribute."""
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


# Functions that dynamo treats as constants. Each is called when the graph is traced, never when it runs.

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


# The next three depend on how dynamo stores its graph. In a torch version that stores it differently, no read is moved.


@_constant
def _move_deferred_reads() -> int:
    with suppress(Exception):
        assert Regions.current is not None
        Regions.current.region.move_deferred_reads(_graph())
    return 0


@_constant
def _read_begins() -> int:
    with suppress(Exception):
        assert Regions.current is not None
        Regions.current.region.read_begins(_graph())
    return 0


@_constant
def _read_ends(place: int) -> int:
    with suppress(Exception):
        assert Regions.current is not None
        Regions.current.region.read_ends(_graph(), place)
    return 0


@_constant
def _is_unchanged(place: int) -> bool:
    assert Regions.current is not None
    read = Regions.current.region.reads.get(place)
    return read is None or read.is_unchanged


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
    """A module is entered. Dynamo traces this function, so only Python that it supports well may stand here."""
    if _opens(type(module).__name__):
        _enter(id(module))


def traced_after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """A module returns. Dynamo traces this function."""
    if _is_open():
        if _leave(id(module)):
            _move_deferred_reads()
            for position, value in enumerate(args):
                _record(value, f"input[{position}]", False, 0)
            for name, value in kwargs.items():
                _record(value, f"kwargs.{name}", False, 0)
            _record(output, "output", not any(value is output for value in args), 0)
        if _left_root():
            _unmark(output, 0)


def _record(value: Any, role: str, returned: bool, depth: int) -> None:
    if value is None:
        _row(role, -1, 1, None, "")
    elif type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        _record_tensor(value, role, returned)
    elif type(value) in (tuple, list) and depth < 3:
        for position, item in enumerate(value):
            _record(item, f"{role}[{position}]", returned, depth + 1)
    elif type(value) is dict and depth < 3:
        for key, item in value.items():
            if type(key) is str:
                _record(item, f"{role}.{key}", returned, depth + 1)
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


def _record_tensor(tensor: torch.Tensor, role: str, returned: bool) -> None:
    if not tensor.dtype.is_floating_point or tensor.numel() == 0 or tensor.layout is not torch.strided:
        _row(role, -1, 3, tensor.dtype, "")
        return
    known = getattr(tensor, MARK, -1)
    if known >= 0 and _is_unchanged(known):
        _row(role, known, 0, tensor.dtype, "")
        return
    device = str(tensor.device)
    place = _row(role, -2, 0, tensor.dtype, device)
    _read_begins()
    if _in_host_memory(device):
        torch.ops.gpuwatch.look(tensor.detach(), getattr(BUFFERS, _token()), place)
    else:
        getattr(BUFFERS, f"place_{place}").copy_(_numbers(tensor.detach()))
    _read_ends(place)
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
