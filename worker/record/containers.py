"""What is inside of a tuple, list, mapping or dataclass, without a call of the script's code.

A batch may make its items as it is asked for them: it augments them with new random numbers, or takes them out of a
queue. To ask such a one changes the training.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice
from types import MemberDescriptorType
from typing import Any

from torch.utils import _pytree

from ...core.signal_errors import suppress_own

_Item = tuple[str | tuple[Any], Any]
"""(what is added to the role, or the key of a mapping; the item)"""


def items_of(value: Any, most: int) -> Iterable[_Item] | None:
    """The first `most` items of a container, or None for another object.

    Tuples, lists, named tuples (by field), mappings, dataclasses and the nodes of torch's pytree are containers. What
    Python's own classes hold is read by their own methods, also in a subclass. A mapping of another kind is asked, but
    not one of the script's own class.
    """
    kind = type(value)  # isinstance would ask the object for its __class__
    if issubclass(kind, tuple | list):
        fields = getattr(kind, "_fields", None)
        items = list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)
        return [(f".{fields[at]}" if fields else f"[{at}]", item) for at, item in enumerate(islice(items, most))]
    held = _field(value, "data") if issubclass(kind, UserDict) else value
    if issubclass(type(held), dict):
        return [((key,), item) for key, item in islice(dict.items(held), most)]
    if issubclass(kind, Mapping):
        return [((key,), value[key]) for key in islice(value, most)] if _is_installed(kind.__module__) else None
    if dataclasses.is_dataclass(kind):
        return [(f".{each.name}", _field(value, each.name)) for each in dataclasses.fields(kind)]
    if kind in _pytree.SUPPORTED_NODES:
        parts = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)[0]
        return [(f"[{at}]", item) for at, item in enumerate(parts[:most])]
    return None


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object; None if it has none."""
    with suppress_own(AttributeError):
        found = object.__getattribute__(value, "__dict__")
        return found if isinstance(found, dict) else None
    return None


def _field(value: Any, name: str) -> Any:
    """What an object has under a name, without its properties; None if it has nothing there."""
    attributes = attributes_of(value) or {}
    if name in attributes:
        return attributes[name]
    of_class = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    if isinstance(of_class, MemberDescriptorType):
        with suppress_own(AttributeError):  # nothing is in this slot so far
            return of_class.__get__(value)
    return None if hasattr(type(of_class), "__get__") else of_class


@lru_cache(maxsize=256)
def _is_installed(module: str) -> bool:
    """Whether a module is Python's or an installed package's."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top in sys.stdlib_module_names - {"__main__"} or "-packages" in file
