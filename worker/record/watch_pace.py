"""`--every auto`: which steps of a rank are watched whole, by what watching costs. Pure: the caller reads the clock.

    steps 0 to 3      all watched whole: compilers, allocators and caches settle
    steps 4 to 51     24 pairs, each with one step that is watched whole and one that is not
    from step 52 on   all, or one in N
    after an alert    64 steps watched whole, and then as before; pairs that were not complete begin anew

The whole step of a pair over the other one, less 1, is what watching costs: the median of all pairs, taken of
logarithms. A step that saves a checkpoint does not move it. Which step of a pair comes first follows the Thue-Morse
sequence: that balances both kinds against any trend, and against what the script does in every 2nd, 4th or 8th step.
The sequence is the same on all ranks.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

WARM_UP = 4
PAIRS = 24
DEAREST = 0.05
"""The share of a step that watching may cost."""
_AIM = 0.005
"""N is chosen for this one: what is read of the other steps costs, too."""
MOST = 64
"""The largest N. All are powers of two, so that ranks that choose differently watch the same steps."""
ALERT = 64
"""Steps that are watched whole after a value out of line."""


class PaceChoice(NamedTuple):
    """What was measured, and what follows from it."""

    every: int
    """One step in this many is watched whole; 1: all are."""
    cost: float
    """What watching a whole step costs, as a share of one that is not."""
    margin: float
    """The cost is within this of the true one in about 19 of 20 cases."""


class WatchPace:
    """The steps of one rank. A step without an optimizer is a batch of the rank's first root."""

    def __init__(self, *, whole: bool) -> None:
        """`whole`: all steps are watched whole, and nothing is measured."""
        self._settled = whole
        self._every = 1
        self._unit = -1
        self._step = 0
        self._began_ns = 0
        self._took_ns = [0, 0]
        """Of the last pair: the step that was not watched whole, and the one that was."""
        self._ratios: list[float] = []
        """Logarithms."""
        self._alert_until = 0
        self._pairs_at = WARM_UP

    def step_begins(self, step: int, now_ns: int) -> PaceChoice | None:
        """A batch begins; `step` counts the optimizer's steps before it. A choice once it is made, else None."""
        if self._unit >= 0 and step == self._step > 0:
            return None  # gradients of several batches are accumulated
        choice = None
        if not self._settled:
            self._measure(now_ns - self._began_ns)
            if self._unit + 1 == self._pairs_at + 2 * PAIRS:
                choice = self._choose()
        self._unit += 1
        self._step, self._began_ns = step, now_ns
        return choice

    @property
    def is_whole(self) -> bool:
        """Whether the step that runs is watched whole."""
        if self._unit < max(WARM_UP, self._alert_until):
            return True
        if self._settled:
            return self._unit % self._every == 0
        pair, is_second = divmod(self._unit - self._pairs_at, 2)
        return pair.bit_count() % 2 == is_second

    def alert(self) -> bool:
        """A value is out of line: watch the next steps whole. False if all are already."""
        was_on = self._unit < self._alert_until or (self._settled and self._every == 1)
        self._alert_until = self._unit + 1 + ALERT
        if not self._settled:
            self._pairs_at = self._alert_until
            self._ratios.clear()
        return not was_on

    def watch_all(self) -> None:
        """Watch all steps whole from here on."""
        self._settled, self._every = True, 1

    def _measure(self, took_ns: int) -> None:
        """The step that has just ended took this long."""
        if self._unit < self._pairs_at:
            return
        self._took_ns[self.is_whole] = took_ns
        light, whole = self._took_ns
        if (self._unit - self._pairs_at) % 2 and min(light, whole) > 0:
            self._ratios.append(math.log(whole / light))

    def _choose(self) -> PaceChoice:
        self._settled = True
        if not self._ratios:
            return PaceChoice(1, math.nan, math.nan)
        middle, margin = median_with_margin(self._ratios)
        cost = math.exp(middle) - 1
        margin *= 1 + cost
        if cost > DEAREST:
            self._every = min(MOST, max(2, 1 << math.ceil(math.log2(cost / _AIM))))
        return PaceChoice(self._every, cost, margin)


def median_with_margin(numbers: list[float]) -> tuple[float, float]:
    """The median, and twice its standard error, of numbers that scatter as a normal distribution does in its middle.

    >>> median_with_margin([0.1, 0.1, 0.1])
    (0.1, 0.0)
    """
    middle = statistics.median(numbers)
    scatter = 1.4826 * statistics.median(abs(number - middle) for number in numbers)
    return middle, 2 * 1.2533 * scatter / math.sqrt(len(numbers))
