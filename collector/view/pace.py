"""When the next picture is due: once a second, and less often where making one takes long."""

from __future__ import annotations

import math

EVERY_S = 1.0
_SHARE = 0.02
"""So much of one processor pictures may take."""


class Pace:
    """`now` is monotonic time in seconds."""

    def __init__(self) -> None:
        self._due = 0.0

    def is_due(self, now: float) -> bool:
        """Whether it is time. The next time is a second later."""
        if now < self._due:
            return False
        self._due = now + EVERY_S
        return True

    def took(self, processor_s: float, now: float) -> None:
        """One was made, in so much processor time."""
        self._due = now + max(EVERY_S, processor_s / _SHARE)

    def stop(self) -> None:
        """None is due any more."""
        self._due = math.inf
