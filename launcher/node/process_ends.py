"""When the processes of a node's ranks ended, by the host's own clock.

torchrun looks ten times a second whether a rank has ended. Two ranks that fail 50 ms apart then end at the same time.
A process that was killed takes a while to end: its memory is freed first, for tens of milliseconds. The kernel takes
the memory from the process before it frees it (exit_mm() in kernel/exit.c), and /proc/PID/statm is zero from then on.
So that is looked at in each turn of the agent. A pidfd (pidfd_open(2), Linux 5.3) wakes it when the process is gone.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from typing import NamedTuple

RankKey = tuple[int, int]
"""(rank, attempt)"""


class _Watched(NamedTuple):
    key: RankKey
    pidfd: int
    statm: int


class ProcessEnds:
    """Notes between which two looks each process that it watches has begun to end."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: list[_Watched] = []
        self._looked_ns = time.time_ns()
        self._ended: dict[RankKey, tuple[int, int]] = {}

    @property
    def fd(self) -> int:
        """Readable when a process is gone. Then call `look`."""
        return self._epoll.fileno()

    def watch(self, key: RankKey, pid: int) -> None:
        """From now on. A process that cannot be watched, or is gone already, has no time."""
        with suppress(OSError, AttributeError):  # Python has the call only where Linux had it when Python was built
            pidfd = os.pidfd_open(pid)
            try:
                self._watched.append(_Watched(key, pidfd, os.open(f"/proc/{pid}/statm", os.O_RDONLY)))
            except OSError:
                os.close(pidfd)
                raise
            self._epoll.register(pidfd, select.EPOLLIN)

    def look(self) -> None:
        """Note which have begun to end since the last look."""
        now_ns = time.time_ns()
        for watched in [watched for watched in self._watched if _is_ending(watched.statm)]:
            self._ended[watched.key] = (self._looked_ns, now_ns)
            self._watched.remove(watched)
            _close(watched)  # the epoll forgets it, too
        self._looked_ns = now_ns

    def when_ns(self, key: RankKey) -> tuple[int, int]:
        """(when the rank's process was last seen alive, when it was seen to end); (0, 0) if that is not known."""
        self.look()
        return self._ended.get(key, (0, 0))

    def close(self) -> None:
        """Let go of all processes."""
        for watched in self._watched:
            _close(watched)
        self._watched.clear()
        self._epoll.close()


def _is_ending(statm: int) -> bool:
    try:
        return os.pread(statm, 2, 0) in (b"0 ", b"")
    except OSError:  # it is gone
        return True


def _close(watched: _Watched) -> None:
    os.close(watched.pidfd)
    os.close(watched.statm)
