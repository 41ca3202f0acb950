"""Child processes that end with their parent, however it ends."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
"""prctl(2), Linux"""


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (on Linux): the thread that started it."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
