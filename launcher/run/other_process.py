"""A process that somebody else started: when it ends, and with which code."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import threading
from contextlib import suppress
from pathlib import Path

_INFO = struct.Struct("=QQ11Ii")
"""struct pidfd_info of linux/pidfd.h: mask, control group, eleven ids, wait status"""
_HAS_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
"""ioctl PIDFD_GET_INFO. It tells the status of a process that was waited for already, from Linux 6.15 on."""


class OtherProcess:
    """Raises ProcessLookupError from the constructor if there is no such process any more."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._status: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True, name=f"gpuwatch-{pid}").start()

    def has_ended(self) -> bool:
        """Whether it has."""
        return self._ended.is_set()

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end."""
        return self._ended.wait(seconds)

    def code(self) -> int | None:
        """Its exit code, negative for a signal; None if that cannot be known any more."""
        return os.waitstatus_to_exitcode(self._status) if self._status is not None else None

    def _wait(self) -> None:
        """In a thread of its own: its parent may take the status away at once."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.poll()
        self._status = self._status_of_zombie()
        if self._status is None:
            self._status = self._status_of_ended()
        self._ended.set()

    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Let go of it, if it has ended."""
        if self._ended.is_set():
            os.close(self._fd)

    def _status_of_ended(self) -> int | None:
        data = bytearray(_INFO.pack(_HAS_EXIT, *[0] * 13))
        with suppress(OSError):
            fcntl.ioctl(self._fd, _GET_INFO, data)
            mask, *_, status = _INFO.unpack(data)
            return int(status) if mask & _HAS_EXIT else None
        return None

    def _status_of_zombie(self) -> int | None:
        """The last field of /proc/PID/stat, as long as its parent has not waited for it."""
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[49]) if fields[0] == "Z" else None
        return None
