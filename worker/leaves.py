"""Opens nested arguments and outputs: a role for every leaf, such as `input[0]`, `kwargs.mask`, `output.logits`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree

_MAX_DEPTH = 16
_MAX_LEAVES = 256


def leaves_of(value: Any, role: str, found: list[tuple[str, Any]], depth: int = 0) -> None:
    """Append (role, leaf) for every leaf of `value` to `found`.

    Opened are tuples and lists (named tuples by field), mappings, dataclasses and whatever torch's pytree knows. A
    leaf is anything else: a tensor, None, or some other object.
    """
    if len(found) >= _MAX_LEAVES:
        return
    if isinstance(value, torch.Tensor) or value is None:
        found.append((role, value))
        return
    if depth > _MAX_DEPTH:
        found.append((role, ...))
        return
    if isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None)
        for position, item in enumerate(islice(value, _MAX_LEAVES)):
            leaves_of(item, f"{role}.{fields[position]}" if fields else f"{role}[{position}]", found, depth + 1)
    elif isinstance(value, Mapping):
        for key in islice(value, _MAX_LEAVES):
            name = f"{role}.{key}" if isinstance(key, str) and key.isidentifier() else f"{role}[{key!r}]"
            leaves_of(value[key], name, found, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            leaves_of(getattr(value, field.name, None), f"{role}.{field.name}", found, depth + 1)
    elif type(value) in _pytree.SUPPORTED_NODES:
        for position, item in enumerate(_pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0][:_MAX_LEAVES]):
            leaves_of(item, f"{role}[{position}]", found, depth + 1)
    else:
        found.append((role, value))
