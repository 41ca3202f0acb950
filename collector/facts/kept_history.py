"""How large the outputs of a rank's modules were: where it is stored, and the numbers once somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.values import DTYPE_NAMES
from ...core.wire.history import unpack
from ...core.wire.messages import History
from .kept_pages import RankNames

LoadHistory = Callable[[], History | None]


class Column(NamedTuple):
    """One thing that a module returned."""

    module: str
    cls: str
    dtype: str


@dataclass(frozen=True)
class OpenHistory:
    """The numbers: float32 of shape (batches, columns); -1 where there is none."""

    batches: list[int]
    steps: list[int]
    columns: list[Column | None]
    """None: not known by name"""
    numbers: Any


@dataclass(frozen=True)
class KeptHistory:
    """Of one root of one rank. `load` gives the message again."""

    load: LoadHistory
    names: RankNames
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
        names = self.names.names
        columns = []
        for slot, dtype in zip(message.slots, message.dtypes, strict=True):
            found = names.slots.get(slot)
            module = names.modules.get(found.module) if found is not None else None
            known = DTYPE_NAMES[dtype] if dtype < len(DTYPE_NAMES) else "unknown"
            columns.append(Column(module.name, module.cls, known) if module is not None else None)
        return OpenHistory(message.batches, message.steps, columns, numbers)
