"""Tensors that could not be read, and results of collectives that are read again once they are there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...core.events.own_limits import UnmeasuredTensor
from ...core.events.run_position import RunPosition
from ...core.frames import RowMark
from ...core.recorder.writer import RecorderWriter
from ...core.roles import RoleKind, parse_role, role_of_parameter
from ..device.device import is_on_device
from .plain_tensor import has_numbers, hides_floats, is_unfinished
from .roots import ModuleInfo, shards_of
from .tensor_stats import measure

_MOST_UNFINISHED = 64
"""Results of collectives in one batch that are looked at again."""
_IGNORED = int(RowMark.IGNORED)


class UnmeasuredRows:
    """What a rank tells of tensors that it could not read."""

    def __init__(self, recorder: RecorderWriter, where: Callable[[], RunPosition]) -> None:
        self._recorder, self._where = recorder, where
        self._is_told = False
        self.unfinished: list[tuple[weakref.ref[Any], int]] = []
        """(tensor, slot of its row) of results of collectives that were not there: see `is_unfinished`."""
        self._gathered: dict[int, bool] = {}
        """By slot of a weight that cannot be read: see `_is_gathered`."""

    def note(self, slot: int, tensor: torch.Tensor, mark: int, info: ModuleInfo | None) -> None:
        """A tensor could not be read. The first one that may hide an overflow is recorded as an event.

        Two kinds hide none: a frozen weight, as a bad one shows in what its module returns; and a weight that FSDP2
        gathers from shards that can be read. A result that a collective still writes into is looked at later
        (`look_at_unfinished`). `info`: the module, if it is a weight.
        """
        if self._is_told or mark & _IGNORED:
            return
        if is_unfinished(tensor) and len(self.unfinished) < _MOST_UNFINISHED:
            self.unfinished.append((weakref.ref(tensor), slot))
            return
        names = self._recorder.names
        role = names.slots[slot].role
        is_frozen = parse_role(role).kind is RoleKind.WEIGHT and not tensor.requires_grad
        if not is_frozen and not self._is_gathered(slot, info) and hides_floats(tensor):
            self._tell(slot, tensor)

    def _tell(self, slot: int, tensor: torch.Tensor) -> None:
        if not self._is_told:
            self._is_told = True
            names, dtype = self._recorder.names, str(tensor.dtype).removeprefix("torch.")
            role, module = names.slots[slot].role, names.modules[names.slots[slot].module]
            self._recorder.append(UnmeasuredTensor(self._where(), module.name, module.cls, role, dtype))

    def look_at_unfinished(self) -> None:
        """Look again at results that were not there when their module returned. Waits for none of them.

        A result that is gone was used by something that has waited for it, and whose rows show it. So is one on a
        device for which the script has waited. One that is bad, or that nobody has waited for, counts as not measured.
        """
        unfinished, self.unfinished = self.unfinished, []
        for ref, slot in unfinished:
            tensor = ref()
            if tensor is not None and (
                is_unfinished(tensor) or (not is_on_device(tensor) and measure(tensor).meta & 0xFF)
            ):
                self._tell(slot, tensor)

    def _is_gathered(self, slot: int, info: ModuleInfo | None) -> bool:
        """Whether FSDP2 makes a weight of this slot in each forward, of shards that can be read."""
        module = info.ref() if info is not None else None
        if info is None or module is None:
            return False
        known = self._gathered.get(slot)
        if known is None:
            role = self._recorder.names.slots[slot].role
            shards = shards_of(info.root.ref(), module)
            known = any(role_of_parameter(name) == role and has_numbers(shard) for name, shard in shards)
            self._gathered[slot] = known
        return known
