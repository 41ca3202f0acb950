"""A call that can run again after an alarm: its arguments, and what torch kept for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..record.containers import attributes_of
from ..record.roots import ModuleInfo
from .code_place import CallSite
from .forward_thread import ContextMaker, RandomNumbers

_MOST_BYTES = 4 << 20
"""A larger tensor that a root was handed is not kept alive."""
_MOST_PARTS = 1000
"""Of an object: one with more is not looked through."""
_PLAIN = frozenset({type(None), bool, int, float, complex, torch.dtype, torch.device, torch.layout, torch.Size, slice})
_ITEMS: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
}
"""Python's own functions: those of a class of the script's may do anything."""


@dataclass(eq=False, slots=True)
class KeptCall:
    """A call that can run again."""

    info: ModuleInfo
    page: int
    issued: bool
    """Collectives ran within it."""
    contexts: list[ContextMaker]
    leaves: list[Any] = field(default_factory=list)
    """Its arguments, where it is kept; a tensor may be a WeakLeaf."""
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


class WeakLeaf(NamedTuple):
    """A tensor or another object that is kept as long as something else keeps it."""

    leaf: Callable[[], Any]


def is_kept_weakly(leaf: Any) -> bool:
    """Whether it may be gone: after `still_there`, whether it is."""
    return isinstance(leaf, WeakLeaf)


def is_tensor(leaf: Any) -> bool:
    """Whether it is one of torch's."""
    return isinstance(leaf, torch.Tensor)


def kept_tensor(tensor: torch.Tensor, most_bytes: int = _MOST_BYTES) -> torch.Tensor | WeakLeaf:
    """Itself, or weakly if it is larger or has a graph: an argument that requires gradients would keep that alive."""
    if tensor.requires_grad or tensor.numel() * tensor.element_size() > most_bytes:
        return WeakLeaf(weakref.ref(tensor))
    return tensor


def kept_object(value: Any) -> Any:
    """An argument that is no tensor: itself if it holds little, or else weakly. A batch may come in any object."""
    kind = type(value)
    if kind in _PLAIN or (kind is str and len(value) < _MOST_BYTES) or _bytes_in(value) <= _MOST_BYTES:
        return value
    # a set and an iterator have no weak references
    return WeakLeaf(weakref.ref(value) if kind.__weakrefoffset__ else _gone)


def _gone() -> None:
    return None


def _bytes_in(value: Any) -> float:
    """The bytes of the tensors, arrays and texts that an object holds; inf where that cannot be seen.

    No method and no property of the script's is called. An object with `__del__` counts as inf: the script expects that
    to be called when the script itself lets go of it.
    """
    found, parts, waiting = 0.0, 0, [value]
    while waiting and found <= _MOST_BYTES:
        part = waiting.pop()
        kind, parts = type(part), parts + 1
        if parts > _MOST_PARTS:
            return inf
        if kind in _PLAIN or isinstance(part, type | weakref.ref):
            continue
        if isinstance(part, torch.Tensor):
            found += inf if part.requires_grad else part.numel() * part.element_size()
        elif isinstance(part, str | bytes | bytearray):
            found += len(part)
        elif kind.__module__ == "numpy":
            found += getattr(part, "nbytes", inf)
        elif kind is FunctionType and part.__closure__ is None:
            continue
        elif callable(part) or hasattr(kind, "__del__"):
            return inf
        else:
            inside = _inside(part)
            if inside is None:
                return inf
            waiting += inside
    return found


def _inside(part: Any) -> list[Any] | None:
    """What an object holds: its items, and the values of its attributes. None if that cannot be seen."""
    found: list[Any] = []
    for kind, items_of in _ITEMS.items():
        if isinstance(part, kind):
            found = list(islice(items_of(part), _MOST_PARTS + 1))
            if type(part) is kind:
                return found
    attributes = attributes_of(part)
    has_slots = any(vars(kind).get("__slots__") for kind in type(part).__mro__)
    return [*found, *attributes.values()] if attributes is not None and not has_slots else None


def redirection(module: nn.Module) -> dict[str, Any]:
    """`{"method_name": "training_step", "original_forward": ...}` while a function of Lightning or Fabric stands in
    place of the module's `forward`, for one call; else {}."""
    forward = vars(module).get("forward")
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if forward is None or not {"method_name", "original_forward"} <= set(names):
        return {}
    return {name: cell.cell_contents for name, cell in zip(names, forward.__closure__, strict=True)}


def still_there(leaf: Any) -> Any:
    """What was kept weakly; as it was, if that is gone."""
    held = leaf.leaf() if isinstance(leaf, WeakLeaf) else None
    return leaf if held is None else held
