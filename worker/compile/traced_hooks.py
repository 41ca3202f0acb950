"""The functions that dynamo traces in place of the hooks. They do nothing until attach.py sets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
