"""Which module is a root, and the number and name of every module under it. Interned once into the recorder."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ..core.recorder.writer import RecorderWriter
from ..core.records import ModuleDef, RootDef
from .names import unwrap, walk, wrapped_child

if TYPE_CHECKING:
    from torch import nn


class ModuleInfo:
    """What the hooks need to know of a module, without keeping it alive."""

    __slots__ = ("cls", "entered", "id", "is_wrapper", "name", "ref", "root", "slots")

    def __init__(self, module: nn.Module, number: int, root: RootInfo, name: str) -> None:
        self.ref = weakref.ref(module)
        self.id = number
        self.root = root
        self.name = name
        self.cls = type(unwrap(module)).__name__
        self.entered = 0
        """A wrapper's: frames in the page when it was last entered."""
        self.is_wrapper = wrapped_child(module) is not None
        self.slots: dict[str, int] = {}


class RootInfo:
    """A root module: its batches are counted by themselves."""

    __slots__ = ("batches", "cls", "definitions", "id", "label", "modules", "ordinal")

    def __init__(self, number: int, cls: str, ordinal: int) -> None:
        self.id = number
        self.cls = cls
        self.ordinal = ordinal
        self.label = cls if ordinal == 0 else f"{cls}#{ordinal + 1}"
        self.modules: dict[int, ModuleInfo] = {}
        self.definitions: dict[tuple[str, str], ModuleInfo] = {}
        """(name, class) -> the first module of that name: one that is made anew in every step shares its number."""
        self.batches = 0

    def knows(self, module: nn.Module) -> bool:
        """Whether the module is a part of this root, as far as is known."""
        info = self.modules.get(id(module))
        return info is not None and info.ref() is module


class Roots:
    """All roots of a rank, in the order of their first call."""

    def __init__(self, recorder: RecorderWriter) -> None:
        self._recorder = recorder
        self._roots: list[tuple[weakref.ref[nn.Module], RootInfo]] = []
        self._root_by_id: dict[int, tuple[weakref.ref[nn.Module], RootInfo]] = {}
        self._owner: dict[int, ModuleInfo] = {}
        """id of a module -> its info under the first root that was known to hold it."""
        self._modules = 0

    def enter(self, module: nn.Module) -> tuple[ModuleInfo, bool]:
        """The info of a module entered while no other is running, and whether this begins a batch of its own.

        A part of an earlier root that is called by itself (the recomputation of a checkpointed block, one encoder
        layer called by hand) belongs to that root and to its current batch.
        """
        known = self._root_by_id.get(id(module))
        if known is not None and known[0]() is module:
            return self._info(module, known[1]), True
        owner = self._owner.get(id(module))
        if owner is not None and owner.ref() is module:
            return owner, False
        root = self._new_root(module)
        return self._info(module, root), True

    def child(self, module: nn.Module, root: RootInfo, parent: ModuleInfo) -> ModuleInfo:
        """The info of a module that runs inside `root`."""
        info = root.modules.get(id(module))
        if info is not None and info.ref() is module:
            return info
        holder = self._find(root)
        if holder is not None:
            self._intern_tree(holder, root)  # the model has grown since
            info = root.modules.get(id(module))
            if info is not None and info.ref() is module:
                return info
        cls = type(module).__name__  # made on the fly: it hangs on no attribute of the model
        return self._intern(module, root, f"{parent.name}.<{cls}>" if parent.name else f"<{cls}>")

    def name_of(self, module: nn.Module) -> str | None:
        """The name of a module that was seen, its class for a root."""
        for _, root in self._roots:
            if root.knows(module):
                info = root.modules[id(module)]
                return info.name or info.cls
        return None

    def _find(self, root: RootInfo) -> nn.Module | None:
        for ref, candidate in self._roots:
            if candidate is root:
                return ref()
        return None

    def _info(self, module: nn.Module, root: RootInfo) -> ModuleInfo:
        info = root.modules.get(id(module))
        return info if info is not None and info.ref() is module else self._intern(module, root, "")

    def _new_root(self, module: nn.Module) -> RootInfo:
        cls = type(unwrap(module)).__name__
        for position, (ref, gone) in enumerate(self._roots):
            if gone.cls == cls and ref() is None:  # a loss that is made anew in every step is one root
                self._roots[position] = self._root_by_id[id(module)] = (weakref.ref(module), gone)
                self._intern_tree(module, gone)
                return gone
        ordinal = sum(root.cls == cls for _, root in self._roots)
        root = RootInfo(len(self._roots), cls, ordinal)
        self._roots.append((weakref.ref(module), root))
        self._root_by_id[id(module)] = self._roots[-1]  # over a dead module whose id came back
        self._recorder.append(RootDef(root.id, cls, ordinal), name=True)
        self._intern_tree(module, root)
        return root

    def _intern_tree(self, module: nn.Module, root: RootInfo) -> None:
        for name, part in walk(module):
            info = root.modules.get(id(part))
            if info is None or info.ref() is not part:
                self._intern(part, root, name)

    def _intern(self, module: nn.Module, root: RootInfo, name: str) -> ModuleInfo:
        first = root.definitions.get((name, type(unwrap(module)).__name__))
        info = ModuleInfo(module, first.id if first is not None else self._modules, root, name)
        root.modules[id(module)] = info
        owner = self._owner.get(id(module))
        if owner is None or owner.ref() is not module:
            self._owner[id(module)] = info
        if first is not None:
            info.slots = first.slots
        else:
            root.definitions[name, info.cls] = info
            self._modules += 1
            self._recorder.append(ModuleDef(info.id, root.id, name, info.cls), name=True)
        return info
