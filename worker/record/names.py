"""Names of modules as the user wrote them, without the parts that wrappers add.

Also what goes by names: `--modules` and `--ignore`, the roles of a call's arguments, and digests of a batch by role.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import translate
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..device.device import is_on_device
from .containers import items_of
from .plain_tensor import is_foreign, unwrapped

if TYPE_CHECKING:
    from torch import nn


# `Module.__call__` leads here, but for a module whose `compile()` was called (module.py, _wrapped_call_impl)
CALL = torch.nn.Module._call_impl.__code__
"""The code object of every module call. A stack frame with this code is a module call."""

_T = TypeVar("_T")

# Class name of a wrapper -> name of the child that it wraps. By name, so that nothing has to be imported.
WRAPPED_CHILD = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
}


def wrapped_child(module: nn.Module) -> nn.Module | None:
    """The module that `module` wraps; None if it is not a wrapper."""
    name = WRAPPED_CHILD.get(_written_class(module).__name__)
    return module._modules.get(name) if name is not None else None


def unwrap(module: nn.Module) -> nn.Module:
    """The module that the user wrote, under any number of wrappers."""
    while (inner := wrapped_child(module)) is not None:
        module = inner
    return module


def class_of(module: nn.Module) -> str:
    """The name of the class that the user wrote: `Block` where `fully_shard` derived `FSDPBlock` from it."""
    return _written_class(unwrap(module)).__name__


def _written_class(module: nn.Module) -> type:
    cls = type(module)
    # fully_shard gives the module a class of the bases (FSDPModule, its own class), named FSDP and its name
    # (_fully_shard.py)
    if cls.__name__.startswith("FSDP") and cls.__mro__[1].__name__ == "FSDPModule" and len(cls.__bases__) > 1:
        cls = cls.__bases__[1]
    return cls


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every module under `root`, once, by its first name.

    A wrapper has the name of the module that it wraps. The root is "". Order and names are those of `named_modules()`
    of the unwrapped model.
    """
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", root)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        inner = wrapped_child(module)
        children: list[tuple[str, nn.Module]] = []
        for child_name, child in module._modules.items():
            if child is None:
                continue
            child_path = name if child is inner else f"{name}.{child_name}" if name else child_name
            children.append((child_path, child))
        stack.extend(reversed(children))


# A script's module may have an attribute by the name of a method: `self.parameters = {...}` hides `parameters()`.


def parts_of(root: nn.Module) -> Iterator[nn.Module]:
    """Every module under `root`, itself included, once: as `root.modules()`."""
    for _, part in walk(root):
        yield part


def parameters_of(root: nn.Module) -> Iterator[nn.Parameter]:
    """Every parameter of every module under `root`, once: as `root.parameters()`."""
    return _each_once(part._parameters for part in parts_of(root))


def buffers_of(root: nn.Module) -> Iterator[torch.Tensor]:
    """Every buffer of every module under `root`, once: as `root.buffers()`."""
    return _each_once(part._buffers for part in parts_of(root))


def _each_once(tables: Iterable[Mapping[str, _T | None]]) -> Iterator[_T]:
    seen: set[int] = set()
    for table in tables:
        for tensor in list(table.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


# Which modules are watched, and which rows are ignored, by shell patterns on their names.


class ModuleSelection:
    """Compiled patterns of `--modules` and `--ignore`."""

    def __init__(self, modules: list[str], ignore: list[str]) -> None:
        self._modules = [re.compile(translate(pattern)) for pattern in modules]
        self._ignore: list[tuple[str, re.Pattern[str], re.Pattern[str] | None]] = []
        for pattern in ignore:
            module, colon, role = pattern.partition(":")
            # brackets of a role such as `output[0]` are literal: only * and ? are wildcards in it
            of_role = re.compile(translate(role.replace("[", "[[]"))) if colon else None
            self._ignore.append((pattern, re.compile(translate(module)), of_role))

    def watches(self, module: str) -> bool:
        """Whether a module gets frames. Without patterns all modules do."""
        return not self._modules or any(pattern.match(module) for pattern in self._modules)

    def ignored_by(self, module: str, role: str) -> str | None:
        """The first rule that covers this row, as the user wrote it; None if there is none."""
        for text, of_module, of_role in self._ignore:
            if of_module.match(module) and (of_role is None or of_role.match(role)):
                return text
        return None


# Flattens nested arguments and outputs. Every leaf has a role, such as `input[0]`, `kwargs.mask`, `output.logits`.


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
    """(role, leaf) for every leaf of a call's result."""
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

    See `items_of` for what is flattened. Everything else is a leaf: a tensor, None, or another object.
    """
    if len(found) >= _MAX_LEAVES:
        return
    if isinstance(value, torch.Tensor) or value is None:
        found.append((role, value))
        return
    if depth > _MAX_DEPTH:
        found.append((role, ...))
        return
    opened = items_of(value, _MAX_LEAVES)
    if opened is None:
        found.append((role, value))
        return
    for name, item in opened:
        if len(found) >= _MAX_LEAVES:
            return
        leaves_of(item, role + name if isinstance(name, str) else _of_key(role, *name), found, depth + 1)


# The digest of a batch's tensors, so that the sample behind an overflow can be found in the data again.


_BYTES = 8
_MOST_BYTES = 1 << 28
"""A larger tensor gets no digest, which would take a second."""
_MOST_DIGESTED = 16


def batch_digest(arguments: list[tuple[str, Any]]) -> dict[str, str]:
    """Role -> digest, of the arguments that are tensors in host memory.

    It is `hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy(), digest_size=8).hexdigest()`.
    """
    found: dict[str, str] = {}
    for role, leaf in arguments:
        if len(found) < _MOST_DIGESTED and isinstance(leaf, torch.Tensor) and _is_plain(leaf):
            data: Any = unwrapped(leaf).detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            found[role] = hashlib.blake2b(data, digest_size=_BYTES).hexdigest()
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and not is_on_device(tensor)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not is_foreign(type(tensor))
        and 0 < tensor.numel() * tensor.element_size() <= _MOST_BYTES
    )
