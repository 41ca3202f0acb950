"""The optimizer's states that are kept in 16 bits or less: which steps read them, and which tensors they are.

A square of a gradient overflows in float16 long before the gradient does. Adam's update is then 0 for good, its weights
stay finite, and the training stops without a sign. A state in float32 is not read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch


class LowPrecisionState:
    """Counts the steps of each optimizer. Its first one is read, and from there one in `every`; 0 reads none."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._until: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Optimizer -> its steps until one is read."""

    def is_due(self, optimizer: Any) -> bool:
        """Count a step that has ended. True if the states are to be read after it."""
        if not self._every:
            return False
        until = self._until.get(optimizer, 0)
        self._until[optimizer] = (until or self._every) - 1
        return until == 0


def low_precision_states(optimizer: Any, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(what the optimizer calls it, tensor) of each state of a parameter in 16 bits or less."""
    held = optimizer.state.get(parameter)
    for key, value in list(held.items()) if isinstance(held, dict) else ():
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dtype.itemsize <= 2:
            yield str(key), value
