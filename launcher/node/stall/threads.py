"""What Linux says of the threads of a process that does not answer: state, and what they wait for in the kernel."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

from ....core.records import ThreadSeen

MOST_THREADS = 16
_X86_64 = {
    0: "read",
    1: "write",
    7: "poll",
    16: "ioctl",
    23: "select",
    24: "sched_yield",
    35: "nanosleep",
    45: "recvfrom",
    47: "recvmsg",
    61: "wait4",
    72: "fcntl",
    73: "flock",
    74: "fsync",
    75: "fdatasync",
    202: "futex",
    230: "clock_nanosleep",
    232: "epoll_wait",
    257: "openat",
    271: "ppoll",
}
"""System calls in which threads wait. (arch/x86/entry/syscalls/syscall_64.tbl)"""


def threads_of(pid: int, root: Path = Path("/")) -> list[ThreadSeen]:
    """The main thread first, then others, as far as they may be read; at most MOST_THREADS."""
    found: list[ThreadSeen] = []
    with suppress(OSError):
        tasks = sorted(
            (root / "proc" / str(pid) / "task").iterdir(), key=lambda task: (task.name != str(pid), task.name)
        )
        for task in tasks[:MOST_THREADS]:
            with suppress(OSError, IndexError):
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                found.append(ThreadSeen(_line(task / "comm"), state, _wchan(task), _system_call(task)))
    return found


def _wchan(task: Path) -> str:
    """ "" where it does not wait, or may not be seen: the kernel then says 0."""
    return _line(task / "wchan").strip("0")


def _system_call(task: Path) -> str:
    """`clock_nanosleep`; on another architecture its number. (man 5 proc, /proc/PID/syscall)"""
    number = _line(task / "syscall").partition(" ")[0]
    if not number.isdigit():  # it runs, or may not be seen
        return ""
    name = _X86_64.get(int(number)) if platform.machine() == "x86_64" else None
    return name or f"number {number}"


def _line(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(errors="replace").strip()
    return ""
