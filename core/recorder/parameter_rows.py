"""The rows of weights and of their gradients in a page."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy

from ..values import decode
from .page_tables import PageTables

Numbers = tuple[int, int, int]
"""low, high, and the flags and the encoding of meta."""


class ParameterRow(NamedTuple):
    """One row of a page."""

    place: int
    """Rows are in the order in which things happened."""
    slot: int
    shape: int
    dtype: int
    low: int
    high: int
    meta: int

    @property
    def abs_max(self) -> float:
        """The largest of its elements in size."""
        return decode(self.high, self.meta >> 8 & 0xFF)

    @property
    def abs_min(self) -> float:
        """The smallest one in size."""
        return decode(self.low, self.meta >> 8 & 0xFF)

    @property
    def numbers(self) -> Numbers:
        """To compare."""
        return self.low, self.high, self.meta & 0xFFFF


def parameter_rows(page: PageTables, chosen: Any) -> list[ParameterRow]:
    """The rows of a mask, in their order in the page."""
    rows, values = page.rows[chosen], page.values[page.positions[chosen]]
    columns = [rows[name].tolist() for name in ("slot", "shape", "dtype")]
    columns += [values[name].tolist() for name in ("low", "high", "meta")]
    return [ParameterRow(*row) for row in zip(numpy.flatnonzero(chosen).tolist(), *columns, strict=True)]
