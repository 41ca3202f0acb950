"""Which module is a root, and the id and name of every module under it. Each definition is recorded once.

A root is a module that the script calls while no other module runs: a model, as a rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...core.bad_values import NAMED_BY_SCRIPT
from ...core.events.definitions import ModuleDef, RootDef
from ...core.recorder.writer import OpenPage, RecorderWriter
from ...core.roles import RoleKind, parse_role, role_of_parameter
from .names import ModuleSelection, class_of, parts_of, unwrap, walk, wrapped_child

if TYPE_CHECKING:
    from torch import nn


_BACKENDS = "<GraphModule>"
"""Part of the names of modules that some torch.compile backends call instead of the compiled ones. Not recorded."""
_FEW = 256
"""Entries of freed modules and parameters are purged only when there are more entries than this."""


def _nothing() -> None:
    return None


def _holds(parent: nn.Module | None, module: nn.Module) -> bool:
    return parent is not None and any(part is module for part in parent._modules.values())


def _temporary_name(parent: ModuleInfo, module: nn.Module) -> str:
    """The name of a temporary module: one that is no attribute of any module of the model."""
    kinds = type(unwrap(module)).__mro__
    is_graph = any(kind.__name__ == "GraphModule" for kind in kinds)  # its own class may be "<lambda>"
    cls = "GraphModule" if is_graph else type(module).__name__
    return f"{parent.name}.<{cls}>" if parent.name else f"<{cls}>"


def shards_of(root: nn.Module | None, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(parameter, this rank's part of it) of a module that FSDP2 shards.

    Within a forward the module holds the whole parameter. The module that FSDP was applied to holds the shard, in
    internals of torch 2.6 to 2.13. If one of these is missing, the shards are unknown.
    """
    for holder in parts_of(root) if root is not None else ():
        of_holder: Any = getattr(holder, "_get_fsdp_state", None)
        state = of_holder() if callable(of_holder) else None
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13: one for each mesh
        for group in groups if groups is not None else [getattr(state, "_fsdp_param_group", None)]:
            for held in getattr(group, "fsdp_params", None) or ():
                info = getattr(held, "_module_info", None)
                local = getattr(getattr(held, "sharded_param", None), "_local_tensor", None)
                if info is not None and info.module is module and isinstance(local, torch.Tensor):
                    yield info.param_name, local


def is_in_parts(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed's ZeRO 3 keeps this rank's part of a parameter (its `ds_tensor`) between its uses."""
    return hasattr(parameter, "ds_tensor") or hasattr(parameter, "ds_id")


def is_released(parameter: torch.Tensor) -> bool:
    """Whether such a parameter is not whole now: it has no elements, or memory that a gathering still writes."""
    return is_in_parts(parameter) and getattr(getattr(parameter, "ds_status", None), "name", "") != "AVAILABLE"


class ParameterSlots(dict[str, int]):
    """Role -> slot of a module with a parameter whose role differs from its name. Python writes its frames."""


@dataclass(slots=True, eq=False, repr=False)
class ModuleInfo:
    """A module as the hooks know it. Does not keep it alive."""

    module: InitVar[nn.Module | None]
    """None for a place that is not a module; its class is then `cls`."""
    id: int
    root: RootInfo
    name: str
    cls: str = ""
    ref: Callable[[], nn.Module | None] = _nothing
    entered: int = 0
    """For a wrapper: the number of frames in the page when it was last entered."""
    first_node: int = 0
    """Number of the first autograd node that could be made in its last call (autograd_graph.py)."""
    guessed: bool = False
    """It was treated as a temporary module, like its siblings, without a search of the tree."""
    is_graph: bool = False
    """A backend of torch.compile runs it: it is no part of the model."""
    is_wrapper: bool = False
    seq: int = -1
    """Collectives issued before it was last entered."""
    slots: dict[str, int] = field(default_factory=dict)
    watched: bool = True
    """Whether it gets frames (`--modules`)."""

    def __post_init__(self, module: nn.Module | None) -> None:
        self.is_graph = _BACKENDS in self.name
        if module is not None:
            self.ref, self.cls = weakref.ref(module), class_of(module)
            self.is_wrapper = wrapped_child(module) is not None and not self.is_graph


def _may_be_trained(module: nn.Module) -> bool:
    parameters = (each for _, part in walk(module) for each in part._parameters.values())
    return any(each is not None and each.requires_grad for each in parameters)


def has_any(infos: Iterable[ModuleInfo], kinds: Collection[RoleKind]) -> bool:
    """Whether a row of one of these kinds was ever recorded of these modules."""
    return any(parse_role(role).kind in kinds for info in infos for role in info.slots)


class RootInfo:
    """A root module. Each root counts its own batches."""

    __slots__ = ("batches", "cls", "definitions", "id", "label", "modules", "page", "ref", "temporary")

    def __init__(self, number: int, cls: str, ordinal: int) -> None:
        self.id = number
        self.ref: Callable[[], nn.Module | None] = _nothing
        self.cls = cls
        self.label = cls if ordinal == 0 else f"{cls}#{ordinal + 1}"
        self.modules: dict[int, ModuleInfo] = {}
        self.definitions: dict[tuple[str, str], ModuleInfo] = {}
        """(name, class) -> the first such module. Later ones, such as one made in every step, share its id."""
        self.temporary: set[tuple[str, type]] = set()
        """(name of the parent, class) of temporary modules. The tree is not searched for the next such module."""
        self.batches = 0
        self.page: OpenPage | None = None
        """The page of its last batch."""

    def has_one(self, module: nn.Module) -> bool:
        """Whether the module is the root itself, or the only one of its class: no other one shares its graphs."""
        same = [info for info in self.modules.values() if info.cls == class_of(module) and not info.is_wrapper]
        return len(same) <= 1 or any(info.ref() is module and not info.name for info in same)

    @property
    def was_trained(self) -> bool:
        """Whether a weight has had a gradient."""
        return has_any(self.definitions.values(), (RoleKind.GRAD_WEIGHT,))

    def knows(self, module: nn.Module) -> bool:
        """Whether the module is known to be a part of this root."""
        info = self.modules.get(id(module))
        return info is not None and info.ref() is module


@dataclass(eq=False, repr=False)
class RankRoots:
    """All roots of a rank, in the order of their first call."""

    _recorder: RecorderWriter
    _selection: ModuleSelection
    _on_parameter: Callable[[torch.Tensor, ModuleInfo, str], None] | None
    """Called for every parameter of a module when the module becomes known."""

    def __post_init__(self) -> None:
        self.infos: list[RootInfo] = []
        """All roots, by their ids."""
        self._root_by_id: dict[int, RootInfo] = {}
        """By id of the module."""
        self._owner: dict[int, ModuleInfo] = {}
        """id of a module -> its info under the first root that holds it."""
        self._modules = 0
        self._many = _FEW
        self.parameters: dict[int, tuple[weakref.ref[torch.Tensor], ModuleInfo, str]] = {}
        """id of a parameter -> the first known module that holds it, and its role there."""

    def enter(self, module: nn.Module) -> tuple[ModuleInfo, bool]:
        """The info of a module that is called while no other is running, and whether the call begins a batch.

        A part of an earlier root may be called by itself: a checkpointed block is recomputed, or the script calls one
        encoder layer. Such a call belongs to that root and to its current batch.
        """
        # weak references everywhere, so that a script can free its model: an id alone may be another module's by now
        known = self._root_by_id.get(id(module))
        if known is not None and known.ref() is module:
            return self._info(module, known), True
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
            del root.modules[id(module)]  # it is called again, so it may be in the tree
        else:
            info = None
            if (parent.name, type(module)) in root.temporary and not _holds(parent.ref(), module):
                info = self._intern(module, root, _temporary_name(parent, module))
                info.guessed = True
                return info
        holder = root.ref()
        if holder is not None:
            self._intern_tree(holder, root)  # the model has grown since
            found = root.modules.get(id(module))
            if found is not None and found.ref() is module:
                return found
        root.temporary.add((parent.name, type(module)))
        if info is None:
            return self._intern(module, root, _temporary_name(parent, module))
        root.modules[id(module)] = info
        info.guessed = False
        return info

    def name_of(self, module: nn.Module) -> str | None:
        """The name of a known module, or its class for a root. None for an unknown module."""
        for root in self.infos:
            if root.knows(module):
                info = root.modules[id(module)]
                return info.name or info.cls
        return None

    def find(self, root_id: int, name: str, cls: str) -> tuple[nn.Module | None, nn.Module | None]:
        """(the root, the module of that name and class in it); None for one that is gone or unknown."""
        root = self.infos[root_id]
        for info in list(root.modules.values()):
            if (info.name, info.cls) == (name, cls):
                return root.ref(), info.ref()
        return None, None

    def is_read(self, module: nn.Module) -> bool:
        """Whether what a module returns is read as it is called by itself."""
        known = (root.modules.get(id(module)) for root in self.infos if root.ref() is module)
        return any(info is not None and info.watched for info in known)

    def weights(self) -> list[torch.Tensor]:
        """The parameters of all modules."""
        alive = (reference() for reference, _, _ in list(self.parameters.values()))
        return [each for each in alive if each is not None]

    def place(self, name: str, root: RootInfo | None, cls: str = NAMED_BY_SCRIPT) -> ModuleInfo:
        """The info of a named place that is not a module, in `root`. If `root` is None, in a root of class `cls`."""
        if root is None:
            root = next((info for info in self.infos if info.cls == cls), None)
        if root is None:
            root = RootInfo(len(self.infos), cls, 0)
            self.infos.append(root)
            self._recorder.append(RootDef(root.id, root.cls, 0), name=True)
        info = root.definitions.get((name, cls))
        if info is None:
            info = ModuleInfo(None, self._modules, root, name, cls)
            self._modules += 1
            root.definitions[name, info.cls] = info
            self._recorder.append(ModuleDef(info.id, root.id, name, info.cls), name=True)
        return info

    def owner_of(self, parameter: torch.Tensor) -> tuple[ModuleInfo, str] | None:
        """The module that holds a parameter, and the parameter's role there; None for an unknown parameter."""
        known = self.parameters.get(id(parameter))
        return known[1:] if known is not None and known[0]() is parameter else None

    def own(self, parameter: torch.Tensor, info: ModuleInfo, role: str) -> None:
        """Remember the module that holds this parameter: for tied weights, the first watched one."""
        known = self.parameters.get(id(parameter))
        if known is None or known[0]() is not parameter or (info.watched and not known[1].watched):
            self.parameters[id(parameter)] = (weakref.ref(parameter), info, role)
            if self._on_parameter is not None:
                self._on_parameter(parameter, info, role)

    def find_parameters(self) -> None:
        """Search the modules of all roots again: parameters may have been added since."""
        for root in self.infos:
            for info in list(root.modules.values()):
                module = info.ref()
                if module is not None:
                    self._own_all(module, info)

    def _own_all(self, module: nn.Module, info: ModuleInfo) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                role = role_of_parameter(name)
                if role != name and not isinstance(info.slots, ParameterSlots):
                    info.slots = ParameterSlots(info.slots)
                self.own(parameter, info, role)

    def _info(self, module: nn.Module, root: RootInfo) -> ModuleInfo:
        info = root.modules.get(id(module))
        return info if info is not None and info.ref() is module else self._intern(module, root, "")

    def _new_root(self, module: nn.Module) -> RootInfo:
        cls = class_of(module)
        # A loss module that is made in every step stays one root. A frozen copy is none that was trained: its values
        # may lead nowhere. And a model that may be trained leaves the roots of frozen ones to those, where it can.
        gone = [known for known in self.infos if known.cls == cls and known.ref() is None]
        if _may_be_trained(module):
            gone.sort(key=lambda known: not known.was_trained)
        else:
            gone = [known for known in gone if not known.was_trained]
        root = gone[0] if gone else None
        if root is None:
            ordinal = sum(known.cls == cls for known in self.infos)
            root = RootInfo(len(self.infos), cls, ordinal)
            self.infos.append(root)
            self._recorder.append(RootDef(root.id, cls, ordinal), name=True)
        root.ref = weakref.ref(module)
        self._root_by_id[id(module)] = root  # replaces a freed module with the same id
        self._intern_tree(module, root)
        return root

    def _intern_tree(self, module: nn.Module, root: RootInfo) -> None:
        for name, part in walk(module):
            info = root.modules.get(id(part))
            if info is None or info.ref() is not part:
                self._intern(part, root, name)

    def _forget_dead(self) -> None:
        """Purge the entries of freed modules and parameters. A forward that makes modules adds some in every call."""
        self._owner = {key: info for key, info in self._owner.items() if info.ref() is not None}
        self._root_by_id = {key: root for key, root in self._root_by_id.items() if id(root.ref()) == key}
        for gone in [key for key, known in self.parameters.items() if known[0]() is None]:
            del self.parameters[gone]
        for root in self.infos:
            root.modules = {key: info for key, info in root.modules.items() if info.ref() is not None}
        self._many = 2 * max(_FEW, len(self._owner) + len(self.parameters))

    def _intern(self, module: nn.Module, root: RootInfo, name: str) -> ModuleInfo:
        if len(self._owner) + len(self.parameters) > self._many:
            self._forget_dead()
        first = root.definitions.get((name, class_of(module)))
        info = ModuleInfo(module, first.id if first is not None else self._modules, root, name)
        info.watched = self._selection.watches(name) and not info.is_graph
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
