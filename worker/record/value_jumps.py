"""Values that are out of line with those before them, in batches of which little is read (`--every auto`). Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable

LAST = 64
"""Values of one tensor that a new one is compared with."""
FEWEST = 8
"""With fewer than these, nothing is out of line: a training may begin anywhere."""
JUMP = 32.0
"""A value is out of line if it is larger than this many times the largest before. Healthy gradients vary by tens."""
_MOST = 256
"""Tensors. A script may make a new model in each step."""


class ValueJumps:
    """The last abs max of each tensor that is read."""

    def __init__(self) -> None:
        self._last: dict[Hashable, _LastValues] = {}

    def is_jump(self, tensor: Hashable, abs_max: float) -> bool:
        """Whether the new `abs_max` of this tensor, the name of one, is out of line with the last ones. It is kept."""
        if not math.isfinite(abs_max):
            return False  # that is an alarm's
        last = self._last.get(tensor)
        if last is None:
            if len(self._last) >= _MOST:
                del self._last[next(iter(self._last))]
            last = self._last[tensor] = _LastValues()
        values, largest = last.values, last.largest
        is_jump = len(values) >= FEWEST and abs_max > JUMP * largest > 0
        gone = values.popleft() if len(values) == LAST else -1.0
        values.append(abs_max)
        if abs_max >= largest:
            last.largest = abs_max
        elif gone == largest:
            last.largest = max(values)
        return is_jump


class _LastValues:
    __slots__ = ("largest", "values")

    def __init__(self) -> None:
        self.values: deque[float] = deque()
        self.largest = 0.0
