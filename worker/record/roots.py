"""Which module is a root, and the number and name of every module under it. Interned once into the recorder."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...core.recorder.writer import OpenPage, RecorderWriter
from ...core.records import ModuleDef, RootDef
from ...core.roles import role_of_parameter
from .names import class_of, walk, wrapped_child
from .selection import Selection

if TYPE_CHECKING:
    import torch
    from torch import nn


_BACKENDS = "<GraphModule>"
"""What some backends of torch.compile call in place of the modules that were compiled: it has no name of its own."""
_FEW = 256
"""Modules and parameters that are gone are only looked for among more than so many."""


def _nothing() -> None:
    return None


def _holds(parent: nn.Module | None, module: nn.Module) -> bool:
    return parent is not None and any(part is module for part in parent._modules.values())


def _made_by(parent: ModuleInfo, module: nn.Module) -> str:
    """The name of a module that is made on the fly: it hangs on no attribute of the model."""
    cls = type(module).__name__
    return f"{parent.name}.<{cls}>" if parent.name else f"<{cls}>"


class Slots(dict[str, int]):
    """Role -> slot, of a module with a parameter whose role is not its name. The native writer leaves it to Python."""


class ModuleInfo:
    """What the hooks need to know of a module, without keeping it alive."""

    __slots__ = ("cls", "entered", "guessed", "id", "is_wrapper", "name", "ref", "root", "seq", "slots", "watched")

    def __init__(self, module: nn.Module | None, number: int, root: RootInfo, name: str, cls: str = "") -> None:
        """`module` is None for a place that is none and calls itself `cls`."""
        self.ref: Callable[[], nn.Module | None] = weakref.ref(module) if module is not None else _nothing
        self.id = number
        self.root = root
        self.name = name
        self.cls = class_of(module) if module is not None else cls
        self.entered = 0
        """A wrapper's: frames in the page when it was last entered."""
        self.guessed = False
        """It was taken for one that is made on the fly, as its like were, and not looked for in the tree."""
        self.is_wrapper = module is not None and wrapped_child(module) is not None
        self.seq = -1
        """Collectives that had been issued when it was last entered."""
        self.slots: dict[str, int] = {}
        self.watched = True
        """Whether it gets frames (`--modules`)."""


class RootInfo:
    """A root module: its batches are counted by themselves."""

    __slots__ = ("batches", "cls", "definitions", "id", "label", "made", "modules", "ordinal", "page")

    def __init__(self, number: int, cls: str, ordinal: int) -> None:
        self.id = number
        self.cls = cls
        self.ordinal = ordinal
        self.label = cls if ordinal == 0 else f"{cls}#{ordinal + 1}"
        self.modules: dict[int, ModuleInfo] = {}
        self.definitions: dict[tuple[str, str], ModuleInfo] = {}
        """(name, class) -> the first module of that name: one that is made anew in every step shares its number."""
        self.made: set[tuple[str, type]] = set()
        """(name of the parent, class) of modules that hang nowhere in the tree. The next such one is not looked for."""
        self.batches = 0
        self.page: OpenPage | None = None
        """The page of its last batch."""

    def knows(self, module: nn.Module) -> bool:
        """Whether the module is a part of this root, as far as is known."""
        info = self.modules.get(id(module))
        return info is not None and info.ref() is module


class Roots:
    """All roots of a rank, in the order of their first call."""

    def __init__(self, recorder: RecorderWriter, selection: Selection) -> None:
        self._recorder = recorder
        self._selection = selection
        self._roots: list[tuple[Callable[[], nn.Module | None], RootInfo]] = []
        self._root_by_id: dict[int, tuple[Callable[[], nn.Module | None], RootInfo]] = {}
        self._owner: dict[int, ModuleInfo] = {}
        """id of a module -> its info under the first root that was known to hold it."""
        self._modules = 0
        self._many = _FEW
        self.parameters: dict[int, tuple[weakref.ref[torch.Tensor], ModuleInfo, str]] = {}
        """id of a parameter -> the first module that was seen to hold it, and its role there."""
        self.on_parameter: Callable[[torch.Tensor, ModuleInfo, str], None] | None = None
        """Called once for every parameter of every module that becomes known."""

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
            if not info.guessed:
                return info
            del root.modules[id(module)]  # it was not thrown away: it may hang somewhere after all
        else:
            info = None
            if (parent.name, type(module)) in root.made and not _holds(parent.ref(), module):
                info = self._intern(module, root, _made_by(parent, module))
                info.guessed = True
                return info
        holder = self._find(root)
        if holder is not None:
            self._intern_tree(holder, root)  # the model has grown since
            found = root.modules.get(id(module))
            if found is not None and found.ref() is module:
                return found
        root.made.add((parent.name, type(module)))
        if info is None:
            return self._intern(module, root, _made_by(parent, module))
        root.modules[id(module)] = info
        info.guessed = False
        return info

    def name_of(self, module: nn.Module) -> str | None:
        """The name of a module that was seen, its class for a root."""
        for _, root in self._roots:
            if root.knows(module):
                info = root.modules[id(module)]
                return info.name or info.cls
        return None

    def place(self, name: str, root: RootInfo | None, cls: str = "detect_overflow") -> ModuleInfo:
        """A place that is no module, in the root that runs or in one of its own: one that the script has named."""
        if root is None:
            root = next((info for _, info in self._roots if info.cls == cls), None)
        if root is None:
            root = RootInfo(len(self._roots), cls, 0)
            self._roots.append((_nothing, root))
            self._recorder.append(RootDef(root.id, root.cls, 0), name=True)
        info = root.definitions.get((name, cls))
        if info is None:
            info = ModuleInfo(None, self._modules, root, name, cls)
            self._modules += 1
            root.definitions[name, info.cls] = info
            self._recorder.append(ModuleDef(info.id, root.id, name, info.cls), name=True)
        return info

    def owner_of(self, parameter: torch.Tensor) -> tuple[ModuleInfo, str] | None:
        """The module that holds a parameter, and the parameter's role there; None for one that nobody has seen."""
        known = self.parameters.get(id(parameter))
        return known[1:] if known is not None and known[0]() is parameter else None

    def own(self, parameter: torch.Tensor, info: ModuleInfo, role: str) -> None:
        """Remember whose parameter this is: of tied weights the first module's that is watched."""
        known = self.parameters.get(id(parameter))
        if known is None or known[0]() is not parameter or (info.watched and not known[1].watched):
            self.parameters[id(parameter)] = (weakref.ref(parameter), info, role)
            if self.on_parameter is not None:
                self.on_parameter(parameter, info, role)

    def find_parameters(self) -> None:
        """Look again at the modules of all roots: parameters may have been put in since."""
        for _, root in self._roots:
            for info in list(root.modules.values()):
                module = info.ref()
                if module is not None:
                    self._own_all(module, info)

    def _own_all(self, module: nn.Module, info: ModuleInfo) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                role = role_of_parameter(name)
                if role != name and not isinstance(info.slots, Slots):
                    info.slots = Slots(info.slots)
                self.own(parameter, info, role)

    def _find(self, root: RootInfo) -> nn.Module | None:
        for ref, candidate in self._roots:
            if candidate is root:
                return ref()
        return None

    def _info(self, module: nn.Module, root: RootInfo) -> ModuleInfo:
        info = root.modules.get(id(module))
        return info if info is not None and info.ref() is module else self._intern(module, root, "")

    def _new_root(self, module: nn.Module) -> RootInfo:
        cls = class_of(module)
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

    def _forget_dead(self) -> None:
        """Modules that a forward makes anew each time leave an entry each behind."""
        self._owner = {key: info for key, info in self._owner.items() if info.ref() is not None}
        self._root_by_id = {key: known for key, known in self._root_by_id.items() if known[0]() is not None}
        for gone in [key for key, known in self.parameters.items() if known[0]() is None]:
            del self.parameters[gone]
        for _, root in self._roots:
            root.modules = {key: info for key, info in root.modules.items() if info.ref() is not None}
        self._many = 2 * max(_FEW, len(self._owner) + len(self.parameters))

    def _intern(self, module: nn.Module, root: RootInfo, name: str) -> ModuleInfo:
        if len(self._owner) + len(self.parameters) > self._many:
            self._forget_dead()
        first = root.definitions.get((name, class_of(module)))
        info = ModuleInfo(module, first.id if first is not None else self._modules, root, name)
        info.watched = self._selection.watches(name) and not name.endswith(_BACKENDS)
        root.modules[id(module)] = info
        self._own_all(module, info)
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
