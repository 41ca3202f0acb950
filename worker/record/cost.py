"""What watching costs, measured in the run itself: every second batch is left out, and the two kinds are compared."""

from __future__ import annotations

import statistics
import time
from collections import deque

from ...core.records import Cost, Where

_WARM_UP = 4
_KEPT = 10_000


class CostMeter:
    """Times from the beginning of one batch to the beginning of the next, for both kinds of batches."""

    def __init__(self) -> None:
        self._began = 0
        self._plain = False
        self._batches = 0
        self._times: dict[bool, deque[int]] = {True: deque(maxlen=_KEPT), False: deque(maxlen=_KEPT)}

    def batch_begins(self, plain: bool) -> None:
        """A batch of the main model begins; `plain` ones are left out."""
        now = time.perf_counter_ns()
        if self._batches > _WARM_UP:  # the batch that ends now is one of those after it
            self._times[self._plain].append(now - self._began)
        self._batches += 1
        self._began, self._plain = now, plain

    def result(self, where: Where) -> Cost | None:
        """Medians in nanoseconds; None while one kind has not been seen."""
        plain, watched = self._times[True], self._times[False]
        if not plain or not watched:
            return None
        return Cost(where, int(statistics.median(plain)), int(statistics.median(watched)), len(plain), len(watched))
