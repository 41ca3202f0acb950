"""Whose optimizer step wrote a weight, and with which settings: evidence for a weight that is bad after it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from ...core.events import OptimizerStep

_KEPT = 16
"""Steps. The numbers of a step on a device arrive a batch later, in which several optimizers may step."""


class _StepFrames(NamedTuple):
    number: int
    """Steps finished after it."""
    optimizer: weakref.ref[Any]
    groups: list[dict[str, float]]


class OptimizerSteps:
    """The last steps of a rank."""

    def __init__(self) -> None:
        self._steps: deque[_StepFrames] = deque(maxlen=_KEPT)

    def add(self, number: int, optimizer: Any) -> None:
        """Remember a step. `number`: steps finished, with this one. Waits for no device."""
        groups = [_numbers(group) for group in optimizer.param_groups]
        self._steps.append(_StepFrames(number, weakref.ref(optimizer), groups))

    def last(self) -> OptimizerStep | None:
        """The last step, with the settings of its first parameter group; None before the first."""
        if not self._steps:
            return None
        _, reference, groups = self._steps[-1]
        optimizer = reference()
        if optimizer is None:
            return None
        return OptimizerStep(_name_of(optimizer), groups[0] if groups else {})

    def find(self, since: int, parameter: torch.Tensor) -> OptimizerStep | None:
        """The first step on a parameter after step `since`; None if it is not known."""
        for number, reference, groups in self._steps:
            optimizer = reference()
            if number <= since or optimizer is None:
                continue
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                if any(held is parameter for held in group["params"]):
                    return OptimizerStep(_name_of(optimizer), settings)
        return None


def _name_of(optimizer: Any) -> str:
    """`torch.optim.adamw.AdamW`; one that TorchScript runs has a name of its own (hooks/rpc_optimizer.py)."""
    return getattr(optimizer, "gpuwatch_name", "") or f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """The settings of a parameter group that are numbers.

    >>> _numbers({"params": [], "lr": 0.1, "betas": (0.9, 0.99), "fused": None})
    {'lr': 0.1, 'betas[0]': 0.9, 'betas[1]': 0.99}
    """
    found: dict[str, float] = {}
    for key, value in group.items():
        if isinstance(value, tuple):
            for position, part in enumerate(value):
                if isinstance(part, int | float):
                    found[f"{key}[{position}]"] = float(part)
        elif isinstance(value, int | float) or _is_on_host(value):
            found[key] = float(value)
    return found


def _is_on_host(value: Any) -> bool:
    """A learning rate may be a tensor. One on a device is not read: that waits for the device."""
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1
