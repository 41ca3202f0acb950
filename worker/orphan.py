"""A child that ends with its parent, however that ends."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
"""prctl(2), Linux"""


def die_with_parent() -> None:
    """Between fork and exec: have the kernel kill this process when its parent is gone (on Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
