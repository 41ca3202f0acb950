"""Runs our own tensor operations so that nothing of the script's notices them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
T = TypeVar("T")


def without_modes(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call with gradients off, and out of sight of every mode that is set (a tracer, a counter, a device)."""
    with torch._C.DisableTorchFunction():  # first: a mode would be shown that gradients go off
        grad = torch.is_grad_enabled()
        if grad:
            torch._C._set_grad_enabled(False)
        try:
            if torch._C._len_torch_dispatch_stack():
                with _disable_current_modes():
                    return call(*args, **kwargs)
            return call(*args, **kwargs)
        finally:
            if grad:
                torch._C._set_grad_enabled(True)
