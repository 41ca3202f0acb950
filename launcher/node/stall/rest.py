"""When a rank has not moved for too long: decided from what its recorder shows, and from how it has moved so far. Pure.

A limit that suits one job is wrong for the next. A rank may rest for as long as the limit says (hang_limit.py), for
three times the longest rest that it has come back from, and before its first batch for four times as long: data is
loaded there, and models are compiled.
"""

from __future__ import annotations

from .hang_limit import HangLimit

LONGEST_REST_TIMES = 3.0
BEFORE_FIRST_BATCH_TIMES = 4.0
TAKES_LONG_TIMES = 4.0
"""Where a rank compiles, or writes a checkpoint."""
_SCRIPT = frozenset({"script", "forward", "backward", "optimizer", "finished", "raised"})
"""Phases in which a rank is expected to move, or to end. What a preflight waits for has deadlines of its own."""


class Rest:
    """How long one rank has rested. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._last: tuple[int, ...] = ()
        self._since = now
        self._longest = 0.0
        self._batch = -1
        """The newest one when it last moved."""
        self._times_told = 0

    def seconds(self, now: float) -> float:
        """Since it last moved."""
        return now - self._since

    def moved(self, movement: tuple[int, ...], batch: int, now: float) -> None:
        """What its recorder shows now (`RecorderReader.movement`); `batch` is its newest one, -1 before the first."""
        if movement == self._last:
            return
        if min(batch - 1, self._batch) >= 0:  # rests before are of another kind: imports, compilation
            self._longest = max(self._longest, now - self._since)
        self._last, self._since, self._times_told, self._batch = movement, now, 0, batch

    def limit_s(self, batch: int, limit: HangLimit, *, takes_long: bool = False) -> float:
        """How long it may rest. `batch` is its newest one, -1 before the first."""
        times = max(BEFORE_FIRST_BATCH_TIMES if batch < 0 else 0.0, TAKES_LONG_TIMES if takes_long else 0.0)
        return max(limit.within_steps_s, times * limit.elsewhere_s, LONGEST_REST_TIMES * self._longest)

    def paused(self, seconds: float) -> None:
        """Nobody has looked for so long, as the machine or all of the job stood still: that was no rest."""
        self._since += seconds

    def is_told(self, phase: str, batch: int, limit: HangLimit, now: float) -> bool:
        """True when a rest has become too long, and each time that it is twice as long as when it was last told of."""
        limit_s = self.limit_s(batch, limit) * 2**self._times_told
        if phase not in _SCRIPT or self.seconds(now) <= limit_s:
            return False
        self._times_told += 1
        return True
