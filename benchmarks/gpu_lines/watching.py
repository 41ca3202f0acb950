"""A model watched for a while: gpuwatch, transformers' class, or nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

PLAIN, FORWARD, ALL, PEER = "plain", "forward+weights", "forward+weights+grads", "DebugUnderflowOverflow"
_WATCHED: dict[str, tuple[str, ...]] = {FORWARD: ("forward", "weights"), ALL: ("forward", "weights", "grads")}


@contextmanager
def watched(how: str, net: nn.Module | None = None, **options: Any) -> Iterator[Any]:
    """gpuwatch.watch() with nothing that aborts, or None for PLAIN. `net` None: every model of this process."""
    if how == PLAIN:
        yield None
        return
    import gpuwatch

    with gpuwatch.watch(net, watch=_WATCHED[how], on_overflow="continue", **options) as handle:
        yield handle


def peer(net: nn.Module) -> bool:
    """Put transformers' class on a model, for good; False if it is not installed."""
    try:
        from transformers.debug_utils import DebugUnderflowOverflow
    except ImportError:
        return False
    DebugUnderflowOverflow(net)
    return True
