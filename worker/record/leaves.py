"""Flattens nested arguments and outputs. Every leaf has a role, such as `input[0]`, `kwargs.mask`, `output.logits`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree

_MAX_DEPTH = 16
_MAX_LEAVES = 256
_TENSOR = torch.Tensor

INPUTS = tuple(f"input[{position}]" for position in range(_MAX_LEAVES))
OUTPUTS = tuple(f"output[{position}]" for position in range(_MAX_LEAVES))
KWARGS: dict[str, str] = {}
"""Name of a keyword argument -> its role. A cache, because a new string would be hashed again in every call."""


def inputs_of(args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """(role, leaf) for every leaf of a call's arguments."""
    found: list[tuple[str, Any]] = []
    for role, value in zip(INPUTS, args if isinstance(args, tuple) else (args,), strict=False):
        if value is None or isinstance(value, _TENSOR):
            found.append((role, value))
        else:
            leaves_of(value, role, found, 1)
    for key in kwargs or ():
        role = KWARGS.get(key) or role_of_keyword(key)
        value = kwargs[key]
        if value is None or isinstance(value, _TENSOR):
            found.append((role, value))
        else:
            leaves_of(value, role, found, 1)
    del found[_MAX_LEAVES:]
    return found


def outputs_of(output: Any) -> list[tuple[str, Any]]:
    """(role, leaf) for every leaf of what a call returned."""
    if output is None or isinstance(output, _TENSOR):
        return [("output", output)]
    found: list[tuple[str, Any]] = []
    if type(output) is tuple:
        for role, value in zip(OUTPUTS, output, strict=False):
            if value is None or isinstance(value, _TENSOR):
                found.append((role, value))
            else:
                leaves_of(value, role, found, 1)
        del found[_MAX_LEAVES:]
    else:
        leaves_of(output, "output", found)
    return found


def role_of_keyword(key: Any) -> str:
    """The role of a keyword argument, cached in `KWARGS`."""
    role = _of_key("kwargs", key)
    if isinstance(key, str) and len(KWARGS) < 4096:
        KWARGS[key] = role
    return role


def _of_key(role: str, key: Any) -> str:
    return f"{role}.{key}" if isinstance(key, str) and key.isidentifier() else f"{role}[{key!r}]"


def leaves_of(value: Any, role: str, found: list[tuple[str, Any]], depth: int = 0) -> None:
    """Append (role, leaf) for every leaf of `value` to `found`.

    Tuples, lists, named tuples (by field), mappings, dataclasses and the nodes of torch's pytree are flattened.
    Everything else is a leaf: a tensor, None, or another object.
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
            leaves_of(value[key], _of_key(role, key), found, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            leaves_of(getattr(value, field.name, None), f"{role}.{field.name}", found, depth + 1)
    elif type(value) in _pytree.SUPPORTED_NODES:
        for position, item in enumerate(_pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0][:_MAX_LEAVES]):
            leaves_of(item, f"{role}[{position}]", found, depth + 1)
    else:
        found.append((role, value))
