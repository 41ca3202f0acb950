"""Operations in the graph of a tensor that were handed numbers outside of their domain, from what autograd has saved.

Until its backward has run, a node holds the operands and results that its derivative needs (docs.pytorch.org,
notes/autograd: saved tensors). So a loss that is nan still has the 0 by which it was divided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ...core.signal_errors import suppress_own
from .packed_nodes import may_be_packed

_MOST_NODES = 4096
_MOST_ELEMENTS = 1 << 26
_MOST_TOLD = 3
_OPERANDS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "DivBackward0": ("other", lambda other: other == 0),
    "LogBackward0": ("self", lambda given: given <= 0),
    "Log2Backward0": ("self", lambda given: given <= 0),
    "Log10Backward0": ("self", lambda given: given <= 0),
    "Log1PBackward0": ("self", lambda given: given <= -1),
    "NllLossBackward0": ("total_weight", lambda total: total == 0),
    "NllLoss2DBackward0": ("total_weight", lambda total: total == 0),
}
"""Node -> (what it saves of its operands, which elements of that its operation is not defined for)."""


def outside_domain(tensor: Any) -> list[str]:
    """Names of the nodes, the nearest to the inputs first. [] where the graph is freed, or shows none.

    `tensor`: one of torch's, or a KeptLoss. Waits for the device.
    """
    found: list[str] = []
    known = {tensor.grad_fn}
    left = deque(known)
    while left and len(known) < _MOST_NODES:
        node = left.popleft()
        if node is None:
            continue
        name = node.name()
        if name not in found and _is_outside(node, name):
            found.append(name)
        for used, _ in node.next_functions:
            if used is not None and used not in known:
                known.add(used)
                left.append(used)
    return found[::-1][:_MOST_TOLD]


def _is_outside(node: Any, name: str) -> bool:
    with suppress_own(Exception):  # what it saved is freed
        if name in _OPERANDS:
            what, is_bad = _OPERANDS[name]
            saved = saved_tensor(node, what)
            return saved is not None and bool(is_bad(saved).any())
        given, result = saved_tensor(node, "self"), saved_tensor(node, "result")
        if given is not None and result is not None:
            return bool(given.isfinite().all()) and not bool(result.isfinite().all())
    return False


def saved_tensor(node: Any, what: str) -> torch.Tensor | None:
    """A tensor that a node has saved; None if there is none, or it would have to be unpacked.

    An unpack hook is code of a checkpoint's or of the script's: it may run a forward again, or wait for a disk. Raises
    RuntimeError if it is freed, or was changed in place since.
    """
    raw = getattr(node, f"_raw_saved_{what}", None)
    if raw is None or may_be_packed(node, raw):
        return None
    saved = getattr(node, f"_saved_{what}", None)
    if not isinstance(saved, torch.Tensor) or saved.numel() > _MOST_ELEMENTS:
        return None
    return saved.detach()
