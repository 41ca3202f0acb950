"""The places that graphs write numbers of tensors to, and the operator by which a graph reads host memory.

    gpuwatch::look(Tensor x, Tensor(a!) token, int place) -> ()      writes the tensor's numbers into SEEN[place]

The numbers of a tensor on a device are reduced in the graph itself. In host memory, reductions traced into the graph
would be slower. The compiler makes them a separate loop, which recomputes the tensors that are not kept (around a
dropout, its whole backward) and handles nan in floating point. On the CPU, with torch 2.13, this takes ten times as
long as reading the memory once.

The operator is declared to change its token. A compiler therefore does not remove the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._dynamo import mark_static_address

from ..stats import device as devices
from ..stats.tensor_stats import NOT_MEASURABLE, TensorReading, TensorStats, measure
from ..stats.torch_reader import GRAPH_NUMBERS

try:
    from ..native.core import Look
except ImportError:  # gpuwatch was installed without a C compiler
    Look = None  # type: ignore[assignment,misc]


SEEN: list[TensorReading | None] = []
"""place -> the numbers that a graph wrote there. The reader sets it back to None."""


def new_place() -> int:
    """A new index into SEEN."""
    SEEN.append(None)
    return len(SEEN) - 1


def _look(tensor: torch.Tensor, token: torch.Tensor, place: int) -> None:
    try:
        seen = TensorReading(measure(tensor), tuple(tensor.shape))
    except Exception:  # an error here must not end the training
        seen = TensorReading(NOT_MEASURABLE, ())
    if 0 <= place < len(SEEN):
        SEEN[place] = seen


def _native_look() -> object:
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if Look is None or exchange is None:
        return _look
    try:
        return Look(
            exchange=exchange, seen=SEEN, cls=TensorReading, numbers=TensorStats, tensor=torch.Tensor, otherwise=_look
        )
    except (TypeError, ValueError):  # a torch version whose internals differ
        return _look


_library: Any = torch.library.Library("gpuwatch", "DEF")  # type: ignore[no-untyped-call]  # torch has no annotation
_library.define("look(Tensor x, Tensor(a!) token, int place) -> ()", tags=(torch.Tag.needs_fixed_stride_order,))
_library.impl("look", _native_look(), "CPU")
_library.impl("look", lambda tensor, token, place: None, "Meta")  # as in tracing: it has no numbers


class _GraphBuffers:
    """The tensors that graphs write to, one attribute each. A graph has guards only on those that it uses.

    place_7 holds the `graph_numbers` of a tensor on a device. token_8 is the token of the `gpuwatch::look` that writes
    SEEN[8]. Each read has its own token: DDP may split a trace into several graphs. If two of these changed the same
    tensor, autograd would refuse the backward of the first, which has saved the tensor.
    """


BUFFERS = _GraphBuffers()


def on_device(place: int) -> torch.Tensor | None:
    """The buffer of a place whose tensor is on a device. None if it is in host memory: its numbers are in SEEN."""
    buffer: torch.Tensor | None = vars(BUFFERS).get(f"place_{place}")
    return buffer


def token(place: int) -> torch.Tensor:
    """The tensor that a read of host memory at this place is declared to change."""
    found: torch.Tensor = vars(BUFFERS)[f"token_{place}"]
    return found


def in_host_memory(device: str) -> bool:
    """Whether tensors on `device` are read by `gpuwatch::look`. Others are reduced in the graph itself."""
    return device == "cpu" and devices.late_device() is None


def place_on(device: str) -> int:
    """A new place for the numbers of a tensor on `device`."""
    place = new_place()
    if in_host_memory(device):
        _keep(f"token_{place}", torch.zeros(1))
    else:
        _keep(f"place_{place}", torch.zeros(GRAPH_NUMBERS, dtype=torch.float64, device=device))
    return place


def forget(places: Iterable[int]) -> None:
    """Discard the numbers of tensors in host memory."""
    for place in places:
        SEEN[place] = None


def renewed(place: int) -> torch.Tensor:
    """Have the next run of a graph write this place to another tensor. Returns the one that the last run was given."""
    name = f"token_{place}" if on_device(place) is None else f"place_{place}"
    given: torch.Tensor = vars(BUFFERS)[name]
    with torch.inference_mode(False):
        setattr(BUFFERS, name, torch.zeros_like(given))
    return given


def _keep(name: str, tensor: torch.Tensor) -> None:
    mark_static_address(tensor)
    setattr(BUFFERS, name, tensor)
