"""Processes that ranks have forked and that have outlived them, such as a data loader's worker that is stuck.

They are told of, and left alone: one of them may be at work on a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from ...core.settings import VARIABLE

PATIENCE_S = 8.0
"""torch's own workers look every five seconds whether their rank is still there."""
_MOST = 8


def left_behind(scratch: Path) -> list[psutil.Process]:
    """What runs with the environment that this launch has given to its ranks. A copy of a process keeps that."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(scratch) in process.environ().get(VARIABLE, "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # it has ended, or is somebody else's
            continue
    return found


def tell_left_behind(scratch: Path, say: Callable[[str], object], patience_s: float = PATIENCE_S) -> None:
    """After all ranks have ended: say which processes they have left, and do not end with them soon."""
    there = left_behind(scratch)
    _, left = psutil.wait_procs(there, timeout=patience_s) if there else ([], [])
    if left:
        pids = ", ".join(str(process.pid) for process in left[:_MOST]) + (", ..." if len(left) > _MOST else "")
        many = len(left) > 1
        say(
            f"{len(left)} process{'es' if many else ''} that a rank had started {'have' if many else 'has'} outlived "
            f"it, such as a data loader's worker that is stuck, and may hold memory: kill {pids}"
        )
