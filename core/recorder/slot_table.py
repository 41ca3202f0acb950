"""One integer for each slot of a rank: NumPy looks up those of all rows of a page at once."""

from __future__ import annotations

from typing import Any

import numpy

_MOST_SLOTS = 1 << 20


class SlotTable:
    """Grows with the slots that are defined. Slots are numbered from 0, and come from a file that may be damaged."""

    def __init__(self, absent: int, dtype: type[numpy.integer[Any]]) -> None:
        """`absent` stands for a slot that has no integer."""
        self._absent = absent
        self._integers = numpy.full(1, absent, dtype)
        """By slot; the last one stands for all slots beyond."""

    def put(self, slot: int, integer: int) -> bool:
        """Give a slot its integer, in place of the one before. False if that is no slot."""
        if not 0 <= slot < _MOST_SLOTS:
            return False
        if slot >= len(self._integers) - 1:
            grown = numpy.full(2 * slot + 64, self._absent, self._integers.dtype)
            grown[: len(self._integers)] = self._integers
            self._integers = grown
        self._integers[slot] = integer
        return True

    def __contains__(self, slot: int) -> bool:
        return 0 <= slot < len(self._integers) - 1 and bool(self._integers[slot] != self._absent)

    def of(self, slots: Any) -> Any:
        """The integers of an array of slots."""
        return self._integers[numpy.minimum(slots, len(self._integers) - 1)]
