"""What both hooks of a module call do first and last: they ask whether torch only traces, and keep out of the script's
recursion limit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.torch_names import name_in_torch
from ..compile import attach

try:
    from ..native.recursion import call_begins, call_ends, work_begins, work_ends
except ImportError:  # not built: the hooks' share of the recursion limit is not given back
    call_begins = call_ends = work_begins = work_ends = lambda: None

__all__ = [
    "call_begins",
    "call_ends",
    "compiler",
    "is_dynamo_compiling",
    "is_tracing",
    "trace_after",
    "trace_before",
    "work_begins",
    "work_ends",
]

is_dynamo_compiling = torch.compiler.is_dynamo_compiling
is_tracing = name_in_torch("torch._C._is_tracing", lambda: False)


class _CompilerFlag(dict[str, bool]):
    """In place of torch.compiler's variables with a torch that has no such flag."""

    def __missing__(self, name: str) -> bool:
        return torch.compiler.is_compiling()


compiler: dict[str, Any] = vars(torch.compiler) if "_is_compiling_flag" in vars(torch.compiler) else _CompilerFlag()
"""Has what torch.compiler.is_compiling() returns where dynamo does not trace. That is two functions of Python, for each
hook of each call."""


# Dynamo traces these, and reaches `attach` from here alone: for an object that it finds by two names it makes a guard
# in Python (torch/_dynamo/guards.py, DUPLICATE_INPUT), which drops what a signal's handler raises in it.


def trace_before(module: nn.Module) -> None:
    """Dynamo traces a call that begins."""
    if attach.before is not None:
        attach.before(module)


def trace_after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Dynamo traces a call that has returned."""
    if attach.after is not None:
        attach.after(module, args, kwargs, output)
