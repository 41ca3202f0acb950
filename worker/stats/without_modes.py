"""Runs gpuwatch's own tensor operations unseen by the script's modes and by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...core.torch_names import name_in_torch

_modes = name_in_torch("torch._C._len_torch_dispatch_stack", lambda: 0)
P = ParamSpec("P")
T = TypeVar("T")


def without_modes(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call with gradients off and with every mode of the script disabled (a tracer, a counter, a default device)."""
    with torch._C.DisableTorchFunction():  # first: else a mode would see that gradients are turned off
        grad = torch.is_grad_enabled()
        if grad:
            torch._C._set_grad_enabled(False)
        try:
            if _modes():
                with _disable_current_modes():
                    return call(*args, **kwargs)
            return call(*args, **kwargs)
        finally:
            if grad:
                torch._C._set_grad_enabled(True)
