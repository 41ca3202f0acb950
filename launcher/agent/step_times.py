"""How long the parts of one rank's steps took: a sample of its steps for the collector, the same steps on all ranks.

A sample is made of blocks of steps that followed each other, so that what happens now and then is seen as such. It is
bounded for any length of run: each time it is full, every second block is let go of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ...core.events import RunPosition, StepTimes
from ...core.recorder.layout import PARTS, HeadField, TimedStep
from ...core.recorder.reader import RecorderReader
from ...core.wire.columns import MOST_STEPS, pack_steps

# How long a rank may stand still: as the user says, or learned from how long its steps take. Pure.

UNTIL_KNOWN_S = 300.0
"""Below the watchdog of NCCL (480 s) and the timeouts of process groups, which end a job and name nobody."""
LEAST_S = 60.0
STEP_TIMES = 10.0
KNOWN_STEPS = 3
LAST_STEPS = 64
"""So many are looked back on."""


class HangLimit(NamedTuple):
    """In seconds."""

    within_steps_s: float
    elsewhere_s: float
    """Before the first batch, and where it compiles, or saves or loads a checkpoint: what steps take says nothing."""


def fixed_limit(seconds: float) -> HangLimit:
    """The user's own."""
    return HangLimit(seconds, seconds)


def learned_limit(steps_s: Sequence[float]) -> HangLimit:
    """From the seconds of a rank's last steps.

    >>> learned_limit([40.0, 2.0, 3.0])
    HangLimit(within_steps_s=400.0, elsewhere_s=400.0)
    >>> learned_limit([2.0, 2.0, 3.0])
    HangLimit(within_steps_s=60.0, elsewhere_s=300.0)
    """
    if len(steps_s) < KNOWN_STEPS:
        return fixed_limit(UNTIL_KNOWN_S)
    within_s = max(LEAST_S, STEP_TIMES * max(steps_s[-LAST_STEPS:]))
    return HangLimit(within_s, max(within_s, UNTIL_KNOWN_S))


BLOCK = 8
"""Steps that followed each other."""


class RankStepTimes:
    """Of one rank in one attempt."""

    def __init__(self) -> None:
        self._seen = 0
        """Timed steps so far."""
        self._every = 1
        """One block of so many is kept."""
        self._kept: list[TimedStep] = []
        self._total_ns = [0] * len(PARTS)
        self._taken = 0
        self._last_s: deque[float] = deque(maxlen=LAST_STEPS)

    def look(self, reader: RecorderReader, header: tuple[int, ...]) -> None:
        """Take the steps that were timed since the last look. What the ring has lost meanwhile is not in the sums."""
        if header[HeadField.STEPS_TIMED] == self._seen:
            return
        for count, step in reader.steps(self._seen):
            self._seen = count
            self.take(step)

    def take(self, step: TimedStep) -> None:
        """One step more."""
        self._taken += 1
        self._last_s.append(sum(step.parts) / 1e9)
        for part, ns in enumerate(step.parts):
            self._total_ns[part] += ns
        if step.number // BLOCK % self._every:
            return
        self._kept.append(step)
        if len(self._kept) > MOST_STEPS:
            self._every *= 2
            self._kept = [kept for kept in self._kept if not kept.number // BLOCK % self._every]

    @property
    def so_far(self) -> tuple[int, list[int]]:
        """(steps that were taken, microseconds of all of them in each part)."""
        return self._taken, [ns // 1000 for ns in self._total_ns] if self._taken else []

    @property
    def last_s(self) -> list[float]:
        """Seconds of the last steps that were timed, in their order."""
        return list(self._last_s)

    def event(self, where: RunPosition) -> StepTimes | None:
        """What is known; None if no step was timed."""
        if not self._kept:
            return None
        return StepTimes(where, self._seen, [ns / 1e9 for ns in self._total_ns], pack_steps(self._kept))
