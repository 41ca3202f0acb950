"""Which slots of a rank are about a call's tensors, its weights and their gradients, and of which module."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import numpy

from ..events.definitions import Definition, ModuleDef, RootDef, ShapeDef, SlotDef
from ..roles import RoleKind, parse_role
from .slot_table import SlotTable

_NO_MODULE = -1


class SlotKind(IntEnum):
    """What a slot is about. A call with one argument and one tensor returned has the first three."""

    OTHER = 0
    ARGUMENT = 1
    """`input[0]`"""
    OUTPUT = 2
    """`output`"""
    GRAD_OUTPUT = 3
    """`grad output`"""
    WEIGHT = 4
    GRAD_WEIGHT = 5


_OF_CALLS = {"input[0]": SlotKind.ARGUMENT, "output": SlotKind.OUTPUT, "grad output": SlotKind.GRAD_OUTPUT}
_OF_WEIGHTS = {RoleKind.WEIGHT: SlotKind.WEIGHT, RoleKind.GRAD_WEIGHT: SlotKind.GRAD_WEIGHT}


class SlotOwners:
    """The slots of one rank, as far as they are defined."""

    def __init__(self) -> None:
        self._kinds = SlotTable(SlotKind.OTHER, numpy.uint8)
        self._owners = SlotTable(_NO_MODULE, numpy.int64)
        self._parameters: dict[int, SlotDef] = {}
        """Of weights and of their gradients."""
        self._slots: dict[tuple[int, SlotKind, str], int] = {}
        """(module, kind, name of the weight) -> slot"""
        self._modules: dict[int, ModuleDef] = {}
        self.whole: list[int] = []
        """Modules that are a root themselves. Without a frame of one, `--modules` has left out a part of the model."""
        self._labels: dict[int, str] = {}
        self._sizes: dict[int, int] = {}

    def define(self, entries: Iterable[Definition]) -> None:
        """New definitions of the rank."""
        for entry in entries:
            if isinstance(entry, SlotDef):
                self._define(entry)
            elif isinstance(entry, ModuleDef):
                self._modules[entry.id] = entry
                if not entry.name:
                    self.whole.append(entry.id)
            elif isinstance(entry, RootDef):
                self._labels[entry.id] = entry.label
            elif isinstance(entry, ShapeDef):
                self._sizes[entry.id] = math.prod(entry.dims)

    def _define(self, entry: SlotDef) -> None:
        role = parse_role(entry.role)
        kind = _OF_CALLS.get(entry.role) or _OF_WEIGHTS.get(role.kind, SlotKind.OTHER)
        if kind == SlotKind.OTHER or not self._kinds.put(entry.id, kind):
            return
        self._owners.put(entry.id, entry.module)
        if kind in (SlotKind.WEIGHT, SlotKind.GRAD_WEIGHT):
            self._parameters[entry.id] = entry
            self._slots[entry.module, kind, role.name] = entry.id

    def kinds(self, slots: Any) -> Any:
        """The `SlotKind` of each of an array of slots."""
        return self._kinds.of(slots)

    def owners(self, slots: Any) -> Any:
        """The number of the module of each of an array of slots; -1: a slot of no kind."""
        return self._owners.of(slots)

    def gradient_of(self, weight: int) -> int:
        """The slot of the gradient of the weight with this slot; -1: none."""
        return self._of_same(weight, SlotKind.GRAD_WEIGHT)

    def weight_of(self, gradient: int) -> int:
        """The slot of the weight of the gradient with this slot; -1: none."""
        return self._of_same(gradient, SlotKind.WEIGHT)

    def _of_same(self, parameter: int, kind: SlotKind) -> int:
        entry = self._parameters[parameter]
        return self._slots.get((entry.module, kind, parse_role(entry.role).name), -1)

    def weight_name(self, weight: int) -> str:
        """`fc1.weight`, of the weight with this slot."""
        return ".".join(filter(None, (self.module_of(weight).name, parse_role(self.role(weight)).name)))

    def role(self, parameter: int) -> str:
        """`grad weight`, of the weight or gradient with this slot."""
        return self._parameters[parameter].role

    def module_of(self, parameter: int) -> ModuleDef:
        """Its module."""
        return self.module(self._parameters[parameter].module)

    def module(self, number: int) -> ModuleDef:
        """The module with this number; one without a name if it is not defined."""
        return self._modules.get(number) or ModuleDef(number, 0, "", "")

    def label(self, root: int) -> str:
        """The label of a root."""
        return self._labels.get(root, "")

    def size(self, shape: int) -> int:
        """Elements of a shape; 0 if it is not defined."""
        return self._sizes.get(shape, 0)
