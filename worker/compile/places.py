"""Where the graphs write the numbers of tensors on a device, and the tokens that keep their reads in order."""

from __future__ import annotations

import torch
from torch._dynamo import mark_static_address

from ..stats.device import late_device
from .graph_op import new_place

NUMBERS = 3
"""Numbers in a buffer: smallest, largest and smallest absolute value, as float64."""


class _Buffers:
    """The tensors that graphs write to, one attribute each. A graph has guards only on those that it uses.

    place_7, ... hold the numbers of tensors on a device. token_0, ... are the tokens of `gpuwatch::look`.
    """


BUFFERS = _Buffers()


def on_device(place: int) -> torch.Tensor | None:
    """The buffer of a place whose tensor is on a device. None if it is in host memory: its numbers are in SEEN."""
    buffer: torch.Tensor | None = vars(BUFFERS).get(f"place_{place}")
    return buffer


def in_host_memory(device: str) -> bool:
    """Whether tensors on `device` are read by `gpuwatch::look`. Others are reduced in the graph itself."""
    return device == "cpu" and late_device() is None


def place_on(device: str) -> int:
    """A new place for the numbers of a tensor on `device`."""
    place = new_place()
    if not in_host_memory(device):
        _keep(f"place_{place}", torch.zeros(NUMBERS, dtype=torch.float64, device=device))
    return place


def new_token() -> str:
    """The attribute of BUFFERS that is a new token."""
    return _keep(f"token_{len(vars(BUFFERS))}", torch.zeros(1))


def _keep(name: str, tensor: torch.Tensor) -> str:
    mark_static_address(tensor)
    setattr(BUFFERS, name, tensor)
    return name
