"""Gradients that parameters had before the first backward that was watched.

An earlier backward has left them, or the script, or a notebook's cell that is run again. A backward adds to what is in
`.grad`. A nan that was there is in the sum, and looks as if that backward had made it.
Whether one was there is computed once for each parameter, on its own device and without waiting for it, when its module
is called for the first time. It counts if the backward has found that very tensor, unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..stats.tensor_stats import version_of
from ..stats.without_modes import without_modes


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
    """What was in `.grad` before the first backward, for parameters that had a gradient then."""

    def __init__(self) -> None:
        self._left: list[_LeftGradient] = []
        self._found: dict[int, tuple[_LeftGradient, int]] = {}
        """id of a parameter -> (its entry, number of the page whose backward has found that gradient)."""

    def __bool__(self) -> bool:
        return bool(self._left)

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
        smallest, largest = torch.aminmax(gradient)
    except (RuntimeError, TypeError):  # it is empty, of 8 bits, or complex (from torch 2.15 on a TypeError)
        return None
    return smallest, largest
