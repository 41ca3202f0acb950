"""Time as this process has lived it: a process that was stopped notices, and counts nobody's silence meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_S = 1.0
"""Who asks many times a second has lived no more than this between two questions, whatever other clocks say."""


class OwnClock:
    """Seconds since it was made, without those in which the process was stopped, or its machine slept.

    Two clocks tell: the machine's goes on while a process is stopped, and the process asks for the time many times a
    second while it is not. So of a step longer than `STEP_S` only that much is counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._now = 0.0

    def now(self) -> float:
        """To be asked many times a second."""
        last, self._last = self._last, self._clock()
        self._now += min(max(0.0, self._last - last), STEP_S)
        return self._now
