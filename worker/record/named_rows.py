"""The numbers by which rows name a module's role and a shape. A new one is recorded once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch

from ...core.events.definitions import ShapeDef, SlotDef
from ...core.recorder.layout import NOTHING
from ...core.roles import RoleKind, parse_role
from ...core.signal_errors import from_outside
from .device_rows import DeviceRows
from .names import ModuleSelection
from .roots import ModuleInfo


@dataclass(eq=False, repr=False)
class NamedRows(DeviceRows):
    """The part of a RowWriter that numbers roles and shapes, and knows which rows an --ignore rule covers."""

    _selection: ModuleSelection

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shapes: dict[tuple[int, ...], int] = {}
        self._slots = 0
        self.argument_slots: Any = numpy.zeros(1024, bool)
        """By slot, at least as long as there are slots: whether it is about an argument of a call."""
        self.ignored: dict[int, str] = {}
        """slot -> the rule that covers it."""

    def slot(self, info: ModuleInfo, role: str) -> int:
        """The id of (module, role). A new one is recorded."""
        slot = info.slots.get(role)
        if slot is None:
            slot = info.slots[role] = self._slots
            self._slots += 1
            if slot >= len(self.argument_slots):
                self.argument_slots = numpy.concatenate((self.argument_slots, numpy.zeros_like(self.argument_slots)))
            self.argument_slots[slot] = parse_role(role).kind in (RoleKind.INPUT, RoleKind.BEFORE)
            self._recorder.append(SlotDef(slot, info.id, role), name=True)
            rule = self._selection.ignored_by(info.name, role)
            if rule is not None:
                self.ignored[slot] = rule
        return slot

    def _shape(self, tensor: torch.Tensor) -> int:
        try:
            return self._shape_of(tensor.shape)
        except (
            RuntimeError,
            TypeError,
        ) as error:  # a nested tensor has no shape, a traced one a symbolic one
            if from_outside(error):
                raise
            return NOTHING

    def _shape_of(self, dims: tuple[int, ...]) -> int:
        shape = self.shapes.get(dims)
        if shape is None:
            dims = tuple(dims)
            try:
                numbers = tuple(int(dim) for dim in dims)
            except Exception as error:  # one dimension of a jagged tensor is symbolic
                if from_outside(error):
                    raise
                return NOTHING
            shape = self.shapes[dims] = len(self.shapes)
            self._recorder.append(ShapeDef(shape, numbers), name=True)
        return shape

    def rule_for(self, module: str, role: str) -> str:
        """The --ignore rule that covers a row; "" if there is none."""
        return self._selection.ignored_by(module, role) or ""
