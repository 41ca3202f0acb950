"""`gpuwatch.detect_overflow(tensor, "after layer_norm")`: does this tensor hold nan or inf, now?"""

from __future__ import annotations

import torch

from ...core.values import NonFinite
from ..session import current_hooks
from .look import look, never_compiled, without_modes


@never_compiled
def detect_overflow(tensor: torch.Tensor, ctx: str) -> bool:
    """Whether a tensor holds nan or inf. Prints one line for each of the two that it holds, `ctx` first.

    after layer_norm has nans
    after layer_norm has infs

    Any kind of tensor is accepted. The call waits for the device, and torch.compile breaks its graph here. In a run
    that gpuwatch watches, the tensor is also recorded under the name `ctx`.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"detect_overflow: expected a tensor, found {type(tensor).__name__}")
    with without_modes():
        numbers = look(tensor)
    detected = print_non_finite(numbers.meta & 0xFF, ctx)
    hooks = current_hooks()
    if hooks is not None:
        hooks.look_at(tensor, ctx)
    return detected


def print_non_finite(flags: int, ctx: str) -> bool:
    """Print the lines for `flags` (core.values.NonFinite). True if any flag is set."""
    if flags & NonFinite.NAN:
        print(f"{ctx} has nans")
    if flags & ~NonFinite.NAN:
        print(f"{ctx} has infs")
    return bool(flags)
