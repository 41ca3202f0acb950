"""When the processes of a node's ranks ended, by the host's own clock.

torchrun looks ten times a second whether a rank has ended. Two ranks that fail 50 ms apart then end at the same time.
The kernel tells the end of any process at once, through its pidfd (pidfd_open(2), Linux 5.3).
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress

RankKey = tuple[int, int]
"""(rank, attempt)"""


class ProcessEnds:
    """Notes the time at which each process that it watches ends."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, RankKey] = {}
        """pidfd -> whose process it is"""
        self._ended: dict[RankKey, int] = {}

    @property
    def fd(self) -> int:
        """Readable when a process has ended. Then call `look`."""
        return self._epoll.fileno()

    def watch(self, key: RankKey, pid: int) -> None:
        """From now on. A process that cannot be watched, or has ended already, has no time."""
        with suppress(OSError, AttributeError):  # Python has the call only where Linux had it when Python was built
            fd = os.pidfd_open(pid)
            self._watched[fd] = key
            self._epoll.register(fd, select.EPOLLIN)

    def look(self) -> None:
        """Note which have ended by now."""
        for fd, _ in self._epoll.poll(0):
            self._ended[self._watched.pop(fd)] = time.time_ns()
            os.close(fd)  # the epoll forgets it, too

    def when_ns(self, key: RankKey) -> int:
        """When the rank's process ended; 0 if that is not known."""
        self.look()
        return self._ended.get(key, 0)

    def close(self) -> None:
        """Let go of all processes."""
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()
        self._epoll.close()
