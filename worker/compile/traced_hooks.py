"""The functions that dynamo traces in place of the hooks. They do nothing until attach.py sets them.

And what keeps an old dynamo away from what the hooks call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    from torch._C._dynamo import eval_frame
except ImportError:  # only an old torch is asked for it
    eval_frame = None  # type: ignore[assignment]

_is_compiling = torch.compiler.is_compiling

before: Callable[[Any], None] | None = None
after: Callable[[Any, Any, Any, Any], None] | None = None
backward: Callable[[], object] | None = None
"""Called while compiled autograd makes a graph of a whole backward. Its result is treated as a constant."""


def is_a_backward(cls: str) -> bool:
    """Whether this class is that of a graph that compiled autograd made of a backward."""
    return cls.startswith("CompiledAutograd")


def in_a_backward(hook: Any, gradient: Any) -> None:
    """Traced by compiled autograd in place of a gradient's hook. It adds no operation to the graph.

    Such a hook cannot record anything there, and a call that dynamo cannot trace would break the graph.
    """
    if backward is not None:
        backward()


def apart_from_dynamo(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook in whose calls dynamo compiles nothing. Since torch 2.7 it is the hook itself, which torch can skip.

    torch 2.5 and 2.6 skip a code object, but not the functions that it calls.
    """
    if eval_frame is None or hasattr(eval_frame, "set_code_exec_strategy"):
        return hook

    def apart(*args: Any) -> Any:
        if _is_compiling():
            return hook(*args)
        before = eval_frame.set_eval_frame(None)
        try:
            return hook(*args)
        finally:
            eval_frame.set_eval_frame(before)

    return apart
