"""CPU tensors on the addresses of a device: its memory is host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_CPU = torch.device("cpu")


class View(NamedTuple):
    """A device's tensor as an operation sees it when its turn comes. It keeps nothing alive, as a kernel does not."""

    address: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """The CPU tensor on the same memory."""
        if 0 in self.size:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=_CPU)
        number = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        storage = torch._C._construct_storage_from_data_pointer(self.address, _CPU, number * self.dtype.itemsize)
        return torch.empty(0, dtype=self.dtype, device=_CPU).set_(storage, 0, self.size, self.stride)


def view(tensor: torch.Tensor) -> View:
    """The view of a device's tensor."""
    return View(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


class Shape(NamedTuple):
    """What a tensor that is to be made looks like."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to it, or to its items where it is a list or a plain tuple."""
    if type(value) in (list, tuple):
        return [each(item, change) for item in value]
    return change(value)
