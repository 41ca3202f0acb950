"""Looks at processes from outside: asks ranks for their stacks, and reads what Linux says of them."""

from __future__ import annotations

import ctypes
import linecache
import os
from dataclasses import dataclass, field
from pathlib import Path

from ....core.records import StackLine, ThreadSeen
from ....core.stalls import MAY_BE_ASKED, asking_signal, parse_fatal, parse_stack, stack_file_name
from .py_spy import PySpy
from .threads import threads_of

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
    native: list[StackLine] = field(default_factory=list)
    """Where the process did not answer: what py-spy has seen inside of the innermost call of `stack`,"""
    threads: list[ThreadSeen] = field(default_factory=list)
    """and its threads."""


class Look:
    """One look at one process: made at `now`, finished by `result` about `LOOK_S` later.

    Later by up to py-spy's limit where the process does not answer and py-spy is there.
    """

    def __init__(self, folder: Path, rank: int, attempt: int, pid: int, now: float) -> None:
        self._file = folder / stack_file_name(rank, attempt)
        self._pid = pid
        self._began = now
        self._ticks = _stat(pid)[1]
        self._size = _size(self._file)
        self._busy: float | None = None
        """Share of one core, once the process has had its time to answer."""
        self._answer: list[StackLine] = []
        self._spy: PySpy | None = None
        _ask(pid, self._file)

    @property
    def is_spying(self) -> bool:
        """py-spy is at work for it."""
        return self._spy is not None

    def is_due(self, now: float, *, may_spy: bool = True) -> bool:
        """Whether it has had its time. `may_spy`: py-spy may be asked, should the process not have answered."""
        if now - self._began < LOOK_S:
            return False
        if self._busy is None:
            state, ticks = _stat(self._pid)
            spent_s = (ticks - self._ticks) / os.sysconf("SC_CLK_TCK")
            self._busy = round(max(0.0, spent_s / (now - self._began)), 2)
            self._answer = self._stack()
            if not self._answer and may_spy:
                self._spy = PySpy(self._pid, state, now)
        return self._spy is None or self._spy.is_done(now)

    def result(self, now: float) -> Seen:
        """What it has shown, once it is due."""
        assert self._busy is not None
        state = _stat(self._pid)[0]
        if self._answer:
            return Seen(state, self._busy, self._answer)
        threads = threads_of(self._pid)
        spied = self._spy.result() if self._spy is not None else None
        if spied is None:
            return Seen(state, self._busy, [], [], threads)
        return Seen(state, self._busy, spied.stack, spied.native, [*threads[:1], *spied.others])

    def close(self) -> None:
        """Without a result: end what is still at work."""
        if self._spy is not None:
            self._spy.close()

    def _stack(self) -> list[StackLine]:
        try:
            with self._file.open("rb") as file:
                file.seek(self._size)
                text = file.read(_MOST_BYTES).decode("utf-8", "replace")
        except OSError:
            return []
        linecache.checkcache()
        return parse_stack(text, linecache.getline)


def fatal_stack(folder: Path, rank: int, attempt: int) -> tuple[list[StackLine], int]:
    """Where a rank stood when a fatal signal ended it, and when that was (nanoseconds); ([], 0) if it left no stack."""
    file = folder / stack_file_name(rank, attempt)
    try:
        with file.open("rb") as opened:
            when_ns = os.fstat(opened.fileno()).st_mtime_ns
            opened.seek(max(0, _size(file) - _MOST_BYTES))
            text = opened.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return [], 0
    linecache.checkcache()
    stack = parse_fatal(text, linecache.getline)
    return stack, when_ns if stack else 0


def _ask(pid: int, file: Path) -> None:
    """Signal the main thread, if the process has our handler: without one, the signal would end it."""
    number = asking_signal()
    if number is None or not _is_ours(file) or not _catches(pid, number):
        return
    try:
        ctypes.CDLL(None).tgkill(pid, pid, number)  # its main thread has the process's own number
    except AttributeError:  # another C library than glibc, or one before 2.30
        try:
            os.kill(pid, number)
        except OSError:
            pass


def _is_ours(file: Path) -> bool:
    """Whether the handler is that of worker/stack_file.py. Another one could end the process."""
    try:
        return bool(file.stat().st_mode & MAY_BE_ASKED)
    except OSError:
        return False


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
