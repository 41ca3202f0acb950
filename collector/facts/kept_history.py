"""How large the outputs of a rank's modules were: where it is stored, and the numbers once somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from ...core.values import DTYPE_NAMES
from ...core.wire.columns import NO_NUMBER, unpack
from ...core.wire.messages import RankHistoryMessage
from .kept_pages import PageCache, RankNames


class ModuleOutputs(NamedTuple):
    """What a module returned."""

    module: str
    cls: str
    dtype: str


class _HistoryColumns(NamedTuple):
    """How the columns of a message become modules: column `sources[i]` belongs to module `targets[i]`."""

    modules: list[ModuleOutputs]
    sources: list[int]
    targets: list[int]


@dataclass(frozen=True)
class OpenHistory:
    """The numbers: float32 of shape (batches, modules); NO_NUMBER where there is none. A module stands there once."""

    batches: list[int]
    steps: list[int]
    modules: list[ModuleOutputs]
    numbers: Any


@dataclass(frozen=True)
class KeptHistory:
    """Of one root of one rank. `load` gives the message again."""

    load: Callable[[], RankHistoryMessage | None]
    names: RankNames
    shelf: PageCache
    root_id: int

    @property
    def root(self) -> str:
        """The root's label."""
        return self.names.names.root_label(self.root_id)

    def open(self) -> OpenHistory | None:
        """None if it is lost or damaged."""
        message = self.load()
        if message is None:
            return None
        try:
            numbers = unpack(message)
        except ValueError:
            return None
        key = ("columns", self.names.place, tuple(message.slots), message.dtypes)
        columns = self.shelf.in_common(key, lambda: self._columns(message))
        found = numpy.full((len(numbers), len(columns.modules)), NO_NUMBER, numpy.float32)
        if len(columns.modules) == len(columns.sources):
            found[:, columns.targets] = numbers[:, columns.sources]
        else:
            for source, target in zip(columns.sources, columns.targets, strict=True):  # the larger one; nan above all
                found[:, target] = numpy.maximum(found[:, target], numbers[:, source])
        return OpenHistory(message.batches, message.steps, columns.modules, found)

    def _columns(self, message: RankHistoryMessage) -> _HistoryColumns:
        names = self.names.names
        place: dict[str, int] = {}
        found = _HistoryColumns([], [], [])
        for column, (slot_id, dtype) in enumerate(zip(message.slots, message.dtypes, strict=True)):
            slot = names.slots.get(slot_id)
            module = names.modules.get(slot.module) if slot is not None else None
            if module is not None:
                if module.name not in place:
                    place[module.name] = len(found.modules)
                    known = DTYPE_NAMES[dtype] if dtype < len(DTYPE_NAMES) else "unknown"
                    found.modules.append(ModuleOutputs(module.name, module.cls, known))
                found.sources.append(column)
                found.targets.append(place[module.name])
        return found
