"""A call that can run again after an alarm: its arguments, and what torch kept for it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..record.roots import ModuleInfo
from .code_place import CallSite
from .forward_thread import ContextMaker, RandomNumbers

_MOST_BYTES = 4 << 20
"""A larger tensor that a root was handed is not kept alive."""


@dataclass(eq=False, slots=True)
class KeptCall:
    """A call that can run again."""

    info: ModuleInfo
    page: int
    issued: bool
    """Collectives ran within it."""
    contexts: list[ContextMaker]
    leaves: list[Any] = field(default_factory=list)
    """Its arguments, where it is kept; a tensor may be a WeakTensor."""
    tree: Any = None
    """Of (args, kwargs); None: the leaves are the positional arguments."""
    versions: list[int] = field(default_factory=list)
    random: RandomNumbers | None = None
    """Those that it got; None: unknown."""
    refusal: str = ""
    """Why it may not run again, as far as that was known when it returned: a clause."""
    site: CallSite | None = None
    """Where the script has called it; None: not known."""
    method: str = "forward"
    """What ran: Lightning calls `training_step` through its module's `forward`."""


class WeakTensor(NamedTuple):
    """A tensor that is kept as long as something else keeps it."""

    tensor: weakref.ref[torch.Tensor]


def is_kept_weakly(leaf: Any) -> bool:
    """Whether it may be gone: after `still_there`, whether it is."""
    return isinstance(leaf, WeakTensor)


def is_tensor(leaf: Any) -> bool:
    """Whether it is one of torch's."""
    return isinstance(leaf, torch.Tensor)


def kept_tensor(tensor: torch.Tensor, most_bytes: int = _MOST_BYTES) -> torch.Tensor | WeakTensor:
    """Itself, or weakly if it is larger or has a graph: an argument that requires gradients would keep that alive."""
    if tensor.requires_grad or tensor.numel() * tensor.element_size() > most_bytes:
        return WeakTensor(weakref.ref(tensor))
    return tensor


def redirection(module: nn.Module) -> dict[str, Any]:
    """`{"method_name": "training_step", "original_forward": ...}` while a function of Lightning or Fabric stands in
    place of the module's `forward`, for one call; else {}."""
    forward = vars(module).get("forward")
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if forward is None or not {"method_name", "original_forward"} <= set(names):
        return {}
    return {name: cell.cell_contents for name, cell in zip(names, forward.__closure__, strict=True)}


def still_there(leaf: Any) -> Any:
    """The tensor that was kept weakly; as it was, if that is gone."""
    held = leaf.tensor() if isinstance(leaf, WeakTensor) else None
    return leaf if held is None else held
