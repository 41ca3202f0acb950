"""What a command has left when its `gpuwatch run` was killed: asked to end, and ended after a while.

The kernel sends the command SIGTERM then. What the command itself has started may hear nothing of it: the children of
a shell, ranks that a shell or Ray has started, a Python that is about to become a rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import psutil

from ...core.recorder.run_folder import RUN_VARIABLE

GRACE_S = 30.0
"""From SIGTERM to SIGKILL, as torchrun has it."""
_GIVE_UP_S = 40.0
"""What not even SIGKILL ends by then, such as a process in a driver, is left to itself."""
_LOOK_S = 0.5


def session_of(pid: int) -> int | None:
    """The session of a process; None if it has ended.

    0 is a session, too: one whose leader is outside of this PID namespace, as a container's first session may be.
    """
    with suppress(OSError):
        return os.getsid(pid)
    return None


class Orphans:
    """Those of one run: what has its variable, and is in its session or a rank.

    A process that has left the session and is no rank is a service that was meant to stay.
    """

    def __init__(self, scratch: Path, session: int | None, ranks: Callable[[], Collection[int]], now: float) -> None:
        """`session` is that of the run, None if unknown; `ranks` says the process ids of its ranks."""
        self._scratch = str(scratch)
        self._session = session
        self._ranks = ranks
        self._began = now
        self._next_look = now
        self._asked: set[int] = set()

    def are_gone(self, now: float) -> bool:
        """Look, and ask those to end that were not asked yet. True once none is left, or nothing more can be done."""
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        left = self._find()
        for process in left:
            with suppress(psutil.Error):
                if now - self._began > GRACE_S:
                    process.kill()
                elif process.pid not in self._asked:
                    process.terminate()
                    self._asked.add(process.pid)
        return not left or now - self._began > _GIVE_UP_S

    def _find(self) -> list[psutil.Process]:
        ranks, found = set(self._ranks()), []
        for process in psutil.process_iter():
            try:
                if process.environ().get(RUN_VARIABLE) != self._scratch or process.status() == psutil.STATUS_ZOMBIE:
                    continue
            except psutil.Error:  # it has ended, or is somebody else's
                continue
            if process.pid in ranks or (self._session is not None and session_of(process.pid) == self._session):
                found.append(process)
        return found
