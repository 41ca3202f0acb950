"""Facts about this host and process that several parts report."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from .signal_errors import suppress_own

DISTRIBUTION = "gpuwatch-cluster"


def host_name() -> str:
    """The host's own name."""
    return socket.gethostname()


def boot_id() -> str:
    """The host's boot, as two hosts may have one name; "" where it is not known."""
    with suppress_own(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def loopback() -> str:
    """The address at which this host alone reaches itself: 127.0.0.1, or ::1 where there is IPv6 alone."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with suppress_own(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
            return address
    return "127.0.0.1"


def versions() -> dict[str, str]:
    """The versions of gpuwatch, Python and the torch that is installed. Ranks that have a preflight say theirs."""
    found = {"gpuwatch": gpuwatch_version(), "python": platform.python_version(), "torch": installed_torch()}
    return {name: version for name, version in found.items() if version}


def gpuwatch_version() -> str:
    """The installed distribution's version; "unknown" when run from a checkout that was never installed."""
    return installed_version(DISTRIBUTION) or "unknown"


def installed_torch() -> str:
    """The version of torch in this environment, without an import of it; "" if there is none that pip knows."""
    return installed_version("torch")


def installed_version(distribution: str) -> str:
    """ "" if it is not installed."""
    with suppress_own(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return ""


def stat_fields(process: Path) -> list[str]:
    """Of /proc/PID, or a thread's folder in it: the fields of `stat` from the state on. (man 5 proc) Raises OSError."""
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def has_part_in_c(name: str = "core") -> bool:
    """Whether this extension of worker/native was compiled for this Python. Without `core`, Python does the same."""
    folder = Path(__file__).parents[1] / "worker" / "native"
    return any((folder / f"{name}{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


# Time as this process has lived it: a process that was stopped notices, and counts nobody's silence meanwhile.

STEP_S = 1.0
"""A process that asks many times a second has lived no more than this between two questions, whatever clocks say."""


class OwnClock:
    """Seconds since it was made, without those in which the process was stopped, or its machine slept.

    Two clocks tell: the machine's goes on while a process is stopped, and the process asks for the time many times a
    second while it is not. So of a step longer than `STEP_S` only that much is counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._now = 0.0

    def now(self) -> float:
        """Seconds so far. Call it many times a second."""
        last, self._last = self._last, self._clock()
        self._now += min(max(0.0, self._last - last), STEP_S)
        return self._now


# Child processes: what they print is heard until a deadline, and they end with their parent, however it ends.


class LineReader:
    """Lines from a pipe that is polled, beside sockets maybe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closed = False
        self._rest = b""

    def lines(self) -> list[bytes]:
        """The complete lines that are there; `closed` once the other side is gone."""
        data = os.read(self.fd, 1 << 16)
        if not data:
            self.closed = True
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def lines_until(fd: int, deadline: Callable[[], float]) -> Iterator[bytes]:
    """The lines of a pipe, until it is closed. Raises TimeoutError at the deadline, monotonic time that may move."""
    reader = LineReader(fd)
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline() - time.monotonic())):
            yield from reader.lines()
            if reader.closed:
                return
    raise TimeoutError


_PR_SET_PDEATHSIG = 1
"""prctl(2), Linux"""


def signal_at_parents_end(number: int) -> Callable[[], object]:
    """A call that has the kernel signal this process when its parent ends (on Linux): the thread that started it.

    It may be made between fork and exec: what it needs is loaded here.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return partial(prctl, _PR_SET_PDEATHSIG, int(number)) if prctl is not None else lambda: None


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    signal_at_parents_end(signal.SIGKILL)()


_MOST_FILES = 1 << 20


def raise_file_limit() -> int:
    """Let this process have as many open files as the host allows; returns how many. A process that is started with
    select() in mind has 1,024, and each node of a job takes one of the collector's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    with suppress_own(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
