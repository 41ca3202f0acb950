"""The tensors that graphs write to: numbers of tensors on a device, and tokens for reads of host memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._dynamo import mark_static_address

from ..stats import device as devices
from ..stats.torch_reader import GRAPH_NUMBERS
from .graph_op import SEEN, new_place


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
