"""Names of modules as the user wrote them, without the parts that wrappers add."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


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
    name = WRAPPED_CHILD.get(type(module).__name__)
    return module._modules.get(name) if name is not None else None


def unwrap(module: nn.Module) -> nn.Module:
    """The module that the user wrote, under any number of wrappers."""
    while (inner := wrapped_child(module)) is not None:
        module = inner
    return module


def class_of(module: nn.Module) -> str:
    """The name of the class that the user wrote: `Block` where `fully_shard` derived `FSDPBlock` from it."""
    cls = type(unwrap(module))
    if cls.__name__.startswith("FSDP") and cls.__mro__[1].__name__ == "FSDPModule" and len(cls.__bases__) > 1:
        cls = cls.__bases__[1]
    return cls.__name__


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
