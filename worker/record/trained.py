"""What the script trains, as far as it is known when a value is bad: which model, which weight.

Asked about bad values alone. A gradient that was recorded is the proof; before the first one the optimizers tell that
were made since the hooks were attached.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...core.frames import Frame
from ...core.recorder.writer import OpenPage
from ...core.roles import GRADIENTS, RoleKind, is_param_group, parse_role
from ..patches import PatchLedger
from .roots import ModuleInfo, RankRoots, RootInfo


class TrainedModules:
    """Which calls and weights of a rank belong to what is trained."""

    def __init__(self, roots: RankRoots) -> None:
        self._roots = roots
        self._apart: dict[tuple[int, str], weakref.ref[nn.Module] | None] = {}
        """(root, module) -> a module that no optimizer holds; None if it was gone by then."""
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def attach(self, patches: PatchLedger) -> None:
        """Notice optimizers from now on."""
        patches.replace(Optimizer, "__init__", self._around_init)

    def _around_init(self, before: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(before)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            before(optimizer, *args, **kwargs)
            self.noticed(optimizer)

        return init

    def noticed(self, optimizer: Any) -> None:
        """An optimizer was made, or steps. One that cannot be held weakly is not: nothing of it reaches the script."""
        with suppress(Exception):
            self._optimizers.add(optimizer)

    def is_apart(self, page: OpenPage, called: Frame) -> bool:
        """Whether nothing trains the module that the script has called: a metric, a teacher, a copy.

        Only if the script trains something else. If it trains nothing, what a model returns is what it is for.
        """
        root = self._root(page.root)
        key = (page.root, called.module)
        if root is None or _has_gradients(_within(root, called.module)):
            return False
        module = self._roots.find(page.root, called.module, called.cls)[1]
        known = self._apart.get(key)
        if known is not None and known() is not module and module is not None:  # another one of its class
            del self._apart[key]
        if key not in self._apart:
            held = self._held()
            # a module that is gone has never had a gradient
            if held and (module is None or not any(id(each) in held for each in module.parameters())):
                self._apart[key] = weakref.ref(module) if module is not None else None
        return key in self._apart

    def has_parameters(self, page: OpenPage, called: Frame) -> bool:
        """Whether the module that the script has called has parameters of its own, or in a module in it."""
        root = self._root(page.root)
        found = _within(root, called.module) if root is not None else ()
        return any(parse_role(role).kind is RoleKind.WEIGHT for info in found for role in info.slots)

    def weight(self, page: OpenPage, frame: Frame, role: str) -> bool | None:
        """Whether a weight gets gradients; None if no gradient of its root has been seen so far."""
        root = self._root(page.root)
        info = root.definitions.get((frame.module, frame.cls)) if root is not None else None
        if root is None or info is None or f"grad {role}" in info.slots or is_param_group(frame.module):
            return True
        return False if _has_gradients(root.definitions.values()) else None

    def was_called(self, page: OpenPage, frame: Frame) -> bool:
        """Whether a call of the module of this frame was recorded."""
        root = self._root(page.root)
        info = root.definitions.get((frame.module, frame.cls)) if root is not None else None
        return info is None or any(parse_role(role).kind is RoleKind.OUTPUT for role in info.slots)

    def _held(self) -> set[int]:
        """Ids of the parameters of all optimizers that live."""
        groups = [group for each in list(self._optimizers) for group in getattr(each, "param_groups", ())]
        return {id(parameter) for group in groups for parameter in group["params"]}

    def _root(self, number: int) -> RootInfo | None:
        return next((root for root in self._roots.infos() if root.id == number), None)


def _within(root: RootInfo, name: str) -> Iterator[ModuleInfo]:
    for info in root.definitions.values():
        if not name or info.name == name or info.name.startswith(f"{name}."):
            yield info


def _has_gradients(infos: Any) -> bool:
    return any(parse_role(role).kind in GRADIENTS for info in infos for role in info.slots)
