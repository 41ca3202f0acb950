"""What watching costs, measured in the run itself: every second batch is skipped, and the two kinds are compared."""

from __future__ import annotations

import statistics
import time
from collections import deque

from ...core.records import Cost, Where

_WARM_UP = 4
_KEPT = 10_000


class CostMeter:
    """Times skipped and watched batches, each from its beginning to the beginning of the next."""

    def __init__(self) -> None:
        self._began = 0
        self._skipped = False
        self._batches = 0
        self._times: dict[bool, deque[int]] = {True: deque(maxlen=_KEPT), False: deque(maxlen=_KEPT)}

    def batch_begins(self, skipped: bool) -> None:
        """A batch of the main model begins."""
        now = time.perf_counter_ns()
        if self._batches > _WARM_UP:  # the batch that ends now came after the warm-up
            self._times[self._skipped].append(now - self._began)
        self._batches += 1
        self._began, self._skipped = now, skipped

    def result(self, where: Where) -> Cost | None:
        """Medians in nanoseconds; None if there was no batch of one kind."""
        skipped, watched = self._times[True], self._times[False]
        if not skipped or not watched:
            return None
        return Cost(where, int(statistics.median(skipped)), int(statistics.median(watched)), len(skipped), len(watched))
