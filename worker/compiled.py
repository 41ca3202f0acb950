"""Rows from inside a region that torch.compile has made one graph of.

While dynamo traces a forward it traces the hooks, too. What they compute there becomes a part of the graph: the
numbers of each output and of each input that no call of the region returned, written into a small buffer of its own
that stays where it is. Names, rows and their order are settled at the time of tracing and cost nothing later. No state
of Python is read or changed when the graph runs, so there is no break and no recompilation.

    traced_before(module)                      -> the graph holds nothing of it
    traced_after(module, args, kwargs, output) -> buffer_7.copy_(stack(amin(x), amax(x), amin(abs(x)))), ...

Seen with torch 2.13. A region is looked into when it is a whole model. The blocks of a model that are compiled one by
one share a graph, and rows inside it could not be told apart: of these only what goes in and comes out is seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch._dynamo import assume_constant_result, mark_static_address
from torch._guards import CompileContext

from ..core.frames import RowKind
from .roots import ModuleInfo

NUMBERS = 3
"""Per buffer: smallest, largest, smallest absolute value, as float64."""
MARK = "_gpuwatch_buffer"
"""On a tensor that a call of the graph has returned: the buffer that has its numbers. Taken off what leaves the graph.

What comes into the graph is never marked: a script may come again with the same tensor, and would find another graph.
"""


class _Buffers:
    """Attributes b0, b1, ... hold the buffers: the guards of a graph are about those that it uses, and no others."""


BUFFERS = _Buffers()
HOST: dict[int, Any] = {}
"""The memory of those that are not on a device."""


@dataclass
class RegionRow:
    """A row of a traced frame: `buffer` has its numbers, -1 if there are none."""

    role: str
    buffer: int
    kind: int
    dtype: torch.dtype | None


@dataclass
class RegionFrame:
    """A traced module call."""

    info: ModuleInfo
    parent: ModuleInfo | None
    depth: int
    rows: list[RegionRow] = field(default_factory=list)


class Region:
    """One graph."""

    def __init__(self, root: ModuleInfo) -> None:
        self.root = root
        self.stack: list[ModuleInfo] = []
        self.left = root
        """The module that has returned last."""
        self.frames: list[RegionFrame] = []
        self.buffers: list[int] = []
        """Those of the forward."""
        self.gradients: list[int] = []
        """Those of the backward, in the order of the forward."""
        self.places: list[tuple[RegionFrame, RegionRow]] = []
        """The row of each of them."""
        self.version = 0
        self.next = -1

    def moved(self) -> bool:
        """Whether the forward has run since the last call. A new batch's gradients are then to come."""
        now = _version(self.buffers[0]) if self.buffers else 0
        before, self.version = self.version, now
        if now != before:
            self.next = len(self.gradients) - 1
        return now != before

    def new_gradients(self, all_of_them: bool) -> list[int]:
        """Positions in `gradients` that have been written since the last call, in the order of the backward.

        Cheap where nothing is new: a backward goes through them from the last to the first, so only the next few are
        looked at, unless all are asked for. Those of a device are not looked at at all, to wait for nothing: once a
        backward is known to run they count as written, one time for each forward.
        """
        found: list[int] = []
        position = self.next
        missed = 0
        while position >= 0 and (all_of_them or missed < 8):
            if _was_written(self.gradients[position]):
                found.append(position)
                missed = 0
                self.next = position - 1
            else:
                missed += 1
            position -= 1
        return found


_UNWRITTEN = -1.0
"""As the smallest absolute value: no tensor has that. The graph of a backward leaves no other trace (torch 2.13)."""


def _was_written(buffer: int) -> bool:
    """Whether a buffer has been written since this was last asked. A device's: always."""
    seen = HOST.get(buffer)
    return seen is None or bool(seen[2] != _UNWRITTEN)


def rewind(buffer: int) -> None:
    """The buffer has been read."""
    seen = HOST.get(buffer)
    if seen is not None:
        seen[2] = _UNWRITTEN


def _version(buffer: int) -> int:
    """How often a buffer has been written: the graph that writes to it counts that up."""
    return int(getattr(BUFFERS, f"b{buffer}")._version)


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
        elif region.root.ref() is module and region.frames:  # dynamo has thrown its first try away
            region.stack.clear()
            region.frames.clear()
            region.buffers.clear()
            region.gradients.clear()
            region.places.clear()
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

    def row(self, role: str, buffer: int, kind: int, dtype: torch.dtype | None, device: str) -> int:
        """A row of the call that returns. The buffer that takes its numbers: a new one if it needs one (-2)."""
        region = self._by_compile[CompileContext.current_compile_id()]
        assert region is not None
        if buffer == -2:
            buffer = _new_buffer(device)
            region.buffers.append(buffer)
        region.frames[-1].rows.append(RegionRow(role, buffer, kind, dtype))
        return buffer

    def gradient(self, device: str) -> int:
        """The buffer for the gradient of the tensor of the last row."""
        region = self._by_compile[CompileContext.current_compile_id()]
        assert region is not None
        buffer = _new_buffer(device)
        region.gradients.append(buffer)
        region.places.append((region.frames[-1], region.frames[-1].rows[-1]))
        return buffer

    @property
    def gradients(self) -> bool:
        """Whether gradients of activations are looked at."""
        return self._gradients


def _new_buffer(device: str) -> int:
    number = len(vars(BUFFERS))
    buffer = torch.zeros(NUMBERS, dtype=torch.float64, device=device)
    mark_static_address(buffer)
    setattr(BUFFERS, f"b{number}", buffer)
    if buffer.is_cpu:
        HOST[number] = buffer.numpy()
        rewind(number)
    return number


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
    return current is not None and current._by_compile.get(CompileContext.current_compile_id()) is not None


@_constant
def _left_root() -> bool:
    current = Regions.current
    region = current._by_compile.get(CompileContext.current_compile_id()) if current is not None else None
    return region is not None and not region.left.name


@_constant
def _row(role: str, buffer: int, kind: int, dtype: Any, device: str) -> int:
    assert Regions.current is not None
    return Regions.current.row(role, buffer, kind, dtype, device)


@_constant
def _gradient(device: str) -> int:
    assert Regions.current is not None
    return Regions.current.gradient(device)


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
    if known >= 0:
        _row(role, known, 0, tensor.dtype, "")
        return
    device = str(tensor.device)
    buffer = _row(role, -2, 0, tensor.dtype, device)
    getattr(BUFFERS, f"b{buffer}").copy_(_numbers(tensor.detach()))
    if returned:
        setattr(tensor, MARK, buffer)
    if returned and tensor.requires_grad and _wants_gradients():
        gradient = _gradient(device)

        def hook(grad: torch.Tensor) -> None:
            getattr(BUFFERS, f"b{gradient}").copy_(_numbers(grad.detach()))

        tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has no annotation there


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor.amin(), tensor.amax(), tensor.abs().amin())).to(torch.float64)


assert (RowKind.NONE, RowKind.NOT_A_TENSOR, RowKind.NOT_MEASURABLE, RowKind.MEASURED) == (1, 2, 3, 0)
