"""The definitions of all ranks, each kept once: ranks of one role define the same modules in the same order.

rank 0   Net  fc1  fc2  head           a rank is a place in this tree: the last thing that it has defined
rank 1   Net  fc1  fc2  head           ranks with the same place have the same names
rank 2   Net  fc1  fc2  norm
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ...core.pages import Names
from ...core.records import Definition

_KEPT = 32
"""Places whose names are kept ready: one for each role of a rank, and those of ranks that have just begun."""
START = 0
"""The place of a rank that has defined nothing."""


class SharedNames:
    """Places by what was defined there."""

    def __init__(self) -> None:
        self._numbers: dict[Definition, int] = {}
        self._entries: list[Definition] = []
        self._next: dict[tuple[int, int], int] = {}
        self._came_from: list[tuple[int, int]] = [(START, -1)]
        self._depths = [0]
        self._ready: OrderedDict[int, Names] = OrderedDict()

    def after(self, place: int, entries: Iterable[Definition]) -> int:
        """The place of a rank that was at `place` and has defined these."""
        for entry in entries:
            number = self._numbers.get(entry)
            if number is None:
                number = self._numbers[entry] = len(self._entries)
                self._entries.append(entry)
            step = (place, number)
            there = self._next.get(step)
            if there is None:
                there = self._next[step] = len(self._came_from)
                self._came_from.append(step)
                self._depths.append(self._depths[place] + 1)
            place = there
        return place

    def depth(self, place: int) -> int:
        """How much was defined up to there."""
        return self._depths[place]

    def at(self, place: int) -> Names:
        """The names of a rank at this place. Not to be changed."""
        names = self._ready.get(place)
        if names is not None:
            self._ready.move_to_end(place)
            return names
        entries: list[Definition] = []
        back = place
        while back != START:
            back, number = self._came_from[back]
            entries.append(self._entries[number])
        names = Names()
        names.add(reversed(entries))
        self._ready[place] = names
        if len(self._ready) > _KEPT:
            self._ready.popitem(last=False)
        return names
