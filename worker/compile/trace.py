"""Rows from inside a region that torch.compile made one graph of.

While dynamo traces a forward it also traces the hooks. Their tensor operations become a part of the graph: they read
each output, and each input that no call of the region returned. Names, rows and their order are fixed while tracing and
cost nothing later. The graph reads and changes no Python state, so there is no graph break and no recompilation.

    traced_before(module)                      -> adds nothing to the graph
    traced_after(module, args, kwargs, output) -> in host memory: gpuwatch::look(x, token_7, 7)
                                                  on a device: place_7.copy_(graph_numbers(x))

attach.py lists the versions of torch that take this. Blocks of a model that are compiled one by one share a
graph, and its rows belong to the module whose call runs it (region_calls.py). So no code here may make dynamo
distinguish one block from another: it would then compile a graph for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._dynamo import assume_constant_result

from ...core.frames import RowKind
from ...core.signal_errors import from_outside, suppress_own
from ..device.torch_reader import graph_numbers
from . import dynamo
from .dynamo import BUFFERS, current_graph, hook_begins, hook_ends, is_closed, traced_class, traced_value
from .region_parts import compiled_views
from .regions import RankRegions

MARK = "_gpuwatch_place"
"""Attribute of a tensor that a call of the graph returned: the place of its numbers. Removed from the graph's outputs.

Inputs of the graph are never marked: a script that passes the same tensor again would cause a recompilation.
"""

_THROUGH_DATA = compiled_views().through_data
_STRIDED, _look = torch.strided, torch.ops.gpuwatch.look

R = TypeVar("R")


def _safely(call: Callable[[RankRegions], R], otherwise: R) -> R:
    """The result of `call`. An error in it must not end the compilation."""
    current = RankRegions.current
    if current is None:
        return otherwise
    try:
        return call(current)
    except Exception as error:
        if from_outside(error):
            raise
        current.give_up(error)
        return otherwise


# Functions that dynamo treats as constants. Each is called when the graph is traced, never when it runs.

C = TypeVar("C", bound=Callable[..., Any])


def _constant(call: C) -> C:
    return assume_constant_result(call)  # type: ignore[no-any-return, no-untyped-call]  # it returns what it is given


@_constant
def _opens() -> bool:  # not given the name of the class: dynamo would guard it for each module
    module = traced_value("module")
    return _safely(lambda regions: regions.opens(type(module).__name__, module), False)


@_constant
def _enter() -> int:
    return _safely(lambda regions: regions.enter(traced_value("module")), 0)


@_constant
def _leave() -> bool:
    return _safely(RankRegions.leave, False)


@_constant
def _is_open() -> bool:
    return RankRegions.current is not None and RankRegions.current.traced is not None and not is_closed()


# The next four depend on how dynamo stores its graph. In a torch version that stores it differently, no read is moved
# or spared.


@_constant
def _move_deferred_reads() -> int:
    with suppress_own(Exception):
        assert RankRegions.current is not None
        RankRegions.current.region.move_deferred_reads(current_graph())
    return 0


@_constant
def _read_begins() -> int:
    with suppress_own(Exception):
        assert RankRegions.current is not None
        RankRegions.current.region.read_begins(current_graph())
    return 0


@_constant
def _place_of_detached() -> int:
    with suppress_own(Exception):
        assert RankRegions.current is not None
        return RankRegions.current.region.place_of_detached(current_graph())
    return -1


@_constant
def _read_ends(place: int) -> int:
    with suppress_own(Exception):
        assert RankRegions.current is not None
        RankRegions.current.region.read_ends(current_graph(), place)
    return 0


@_constant
def _has_read(place: int) -> bool:
    assert RankRegions.current is not None
    return RankRegions.current.region.has_read(place)


@_constant
def _is_tensor(or_parameter: bool) -> bool:
    cls = _safely(lambda _: traced_class("value"), None)
    return cls is torch.Tensor or (or_parameter and cls is torch.nn.Parameter)


@_constant
def _left_root() -> bool:
    region = RankRegions.current.traced if RankRegions.current is not None else None
    return region is not None and not region.left.name


@_constant
def _in_host_memory(device: str) -> bool:
    return dynamo.in_host_memory(device)


@_constant
def _row(role: str, place: int, kind: int, dtype: Any, device: str) -> int:
    assert RankRegions.current is not None
    return RankRegions.current.row(role, place, kind, dtype, device)


@_constant
def _gradient(device: str) -> int:
    assert RankRegions.current is not None
    return RankRegions.current.gradient(device)


@_constant
def _hook_begins() -> int:
    hook_begins()
    return 0


@_constant
def _hook_ends() -> int:
    hook_ends()
    return 0


@_constant
def _wants_gradients() -> bool:
    return RankRegions.current is not None and RankRegions.current.region.with_gradients


# What dynamo traces.


def traced_before(module: torch.nn.Module) -> None:
    """A module is entered. Dynamo traces this function, so only Python that it supports well may stand here."""
    if _opens():
        _enter()  # not given its id: dynamo would make a graph for each block of a model


def traced_after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """A module returns. Dynamo traces this function."""
    if _is_open():
        if _leave():
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
    elif _is_tensor(True):
        _record_tensor(value, role, returned)
    elif type(value) in (tuple, list) and depth < 3:
        for position, item in enumerate(value):
            _record(item, f"{role}[{position}]", returned, depth + 1)
    elif isinstance(value, dict) and depth < 3:
        for key, item in value.items():
            if type(key) is str:
                _record(item, f"{role}.{key}", returned, depth + 1)
    else:
        _row(role, -1, 2, None, "")


def _unmark(value: Any, depth: int) -> None:
    if _is_tensor(False) and getattr(value, MARK, -1) >= 0:
        setattr(value, MARK, -1)
    elif type(value) in (tuple, list) and depth < 3:
        for item in value:
            _unmark(item, depth + 1)
    elif isinstance(value, dict) and depth < 3:
        for item in value.values():
            _unmark(item, depth + 1)


def _record_tensor(tensor: torch.Tensor, role: str, returned: bool) -> None:
    if not tensor.dtype.is_floating_point or tensor.numel() == 0 or tensor.layout is not _STRIDED:
        _row(role, -1, 3, tensor.dtype, "")
        return
    known = getattr(tensor, MARK, -1)
    if known >= 0 and _has_read(known):
        _row(role, known, 0, tensor.dtype, "")
        return
    device = str(tensor.device)
    _read_begins()
    detached = tensor.detach()
    known_place = _place_of_detached()
    place = _row(role, known_place if known_place >= 0 else -2, 0, tensor.dtype, device)
    if known_place < 0:
        if _in_host_memory(device):
            _look(detached, getattr(BUFFERS, f"token_{place}"), place)
        else:
            getattr(BUFFERS, f"place_{place}").copy_(graph_numbers(detached))
        _read_ends(place)
    if returned or known >= 0:
        setattr(tensor, MARK, place)
    if returned and tensor.requires_grad and _wants_gradients():
        gradient = _gradient(device)

        def hook(grad: torch.Tensor) -> torch.Tensor:
            if _in_host_memory(device):
                _look(grad.detach(), getattr(BUFFERS, f"token_{gradient}"), gradient)
            elif _THROUGH_DATA:
                getattr(BUFFERS, f"place_{gradient}").data.copy_(graph_numbers(grad.detach()))
            else:
                getattr(BUFFERS, f"place_{gradient}").copy_(graph_numbers(grad.detach()))
            return grad  # compiled autograd takes None for the gradient itself

        _hook_begins()
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has no annotation there
        _hook_ends()


_kinds = RowKind.MEASURED, RowKind.NONE, RowKind.NOT_A_TENSOR, RowKind.NOT_MEASURABLE
assert [kind.number for kind in _kinds] == [0, 1, 2, 3]
