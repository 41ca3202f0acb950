"""How long a rank may stand still: as the user says, or learned from how long its steps take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
