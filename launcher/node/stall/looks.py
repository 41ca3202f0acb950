"""Looks at processes from outside: asks ranks for their stacks, and reads what Linux says of them."""

from __future__ import annotations

import ctypes
import linecache
import os
from dataclasses import dataclass
from pathlib import Path

from ....core.records import StackLine
from ....core.stalls import asking_signal, parse_fatal, parse_stack, stack_file_name

LOOK_S = 1.0
"""How long a rank has to answer, and over which its use of the processor is measured."""
_MOST_BYTES = 64 << 10


@dataclass(frozen=True)
class Seen:
    """What a look has shown."""

    state: str
    """Letter as in /proc/PID/stat; "" if it could not be read."""
    busy: float
    """Share of one core."""
    stack: list[StackLine]


class Look:
    """One look at one process: made at `now`, finished by `result` about `LOOK_S` later."""

    def __init__(self, folder: Path, rank: int, attempt: int, pid: int, now: float) -> None:
        self._file = folder / stack_file_name(rank, attempt)
        self._pid = pid
        self._began = now
        self._ticks = _stat(pid)[1]
        self._size = _size(self._file)
        _ask(pid, self._file)

    def is_due(self, now: float) -> bool:
        """Whether it has had its time."""
        return now - self._began >= LOOK_S

    def result(self, now: float) -> Seen:
        """What it has shown."""
        state, ticks = _stat(self._pid)
        spent_s = (ticks - self._ticks) / os.sysconf("SC_CLK_TCK")
        return Seen(state, round(max(0.0, spent_s / max(now - self._began, 1e-3)), 2), self._stack())

    def _stack(self) -> list[StackLine]:
        try:
            with self._file.open("rb") as file:
                file.seek(self._size)
                text = file.read(_MOST_BYTES).decode("utf-8", "replace")
        except OSError:
            return []
        linecache.checkcache()
        return parse_stack(text, linecache.getline)


def fatal_stack(folder: Path, rank: int, attempt: int) -> list[StackLine]:
    """Where a rank stood when a fatal signal ended it; [] where it left no stack."""
    file = folder / stack_file_name(rank, attempt)
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, _size(file) - _MOST_BYTES))
            text = opened.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    linecache.checkcache()
    return parse_fatal(text, linecache.getline)


def _ask(pid: int, file: Path) -> None:
    """Signal the main thread, if the process has our handler: without one, the signal would end it."""
    number = asking_signal()
    if number is None or not file.exists() or not _catches(pid, number):
        return
    try:
        ctypes.CDLL(None).tgkill(pid, pid, number)  # its main thread has the process's own number
    except AttributeError:  # another C library than glibc, or one before 2.30
        try:
            os.kill(pid, number)
        except OSError:
            pass


def _catches(pid: int, number: int) -> bool:
    """SigCgt in /proc/PID/status: a mask of the signals that the process has handlers for. (man 5 proc)"""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def _stat(pid: int) -> tuple[str, int]:
    """(state, clock ticks used) of a process; ("", 0) if it cannot be read. (man 5 proc, /proc/PID/stat)"""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return "", 0


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
