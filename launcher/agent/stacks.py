"""Inspects processes from outside: asks ranks for their stacks, and reads their state from Linux."""

from __future__ import annotations

import ctypes
import linecache
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from ...core.events import StackLine, ThreadSeen
from ...core.host import stat_fields
from ...core.stalls import (
    MAY_BE_ASKED,
    MOST_LINES,
    asking_signal,
    is_around_collectives,
    is_users,
    parse_fatal,
    parse_stack,
    stack_file_name,
)

# What Linux says of the threads of a process that does not answer: state, and what they wait for in the kernel.

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
                state = stat_fields(task)[0]
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


# The stack of a process that does not answer, by py-spy: where that is installed, and allowed to look at it.
#
# py-spy --native holds the process for as long as it reads. A process that is stopped, or that no signal reaches, is
# read as it stands. (github.com/benfred/py-spy)

LIMIT_S = 3.0
_KILLED_S = 1.0
_MOST_PY_SPY_BYTES = 4 << 20
_NATIVE = (".c", ".h", ".cc", ".cpp", ".cxx", ".S")
_MOST_NATIVE = 8
_MOST_OTHERS = 16
_HELD = "TD"
"""States in which a process cannot be held."""


class _StackFrame(msgspec.Struct, frozen=True):
    name: str
    filename: str
    line: int = 0


class _ThreadStack(msgspec.Struct, frozen=True):
    os_thread_id: int | None = None
    thread_name: str | None = None
    frames: list[_StackFrame] = []


class StacksSeen(NamedTuple):
    """The result of one look at a process."""

    stack: list[StackLine]
    """The main thread's Python calls, innermost first."""
    native: list[StackLine]
    """By py-spy: native calls inside of the innermost of them, innermost first."""
    threads: list[ThreadSeen]
    """The threads of a process that did not answer."""
    state: str = ""
    """Letter as in /proc/PID/stat; "" if it could not be read."""
    busy: float = 0.0
    """Share of one core."""


class PySpy:
    """One call of py-spy, with a deadline. `now` is monotonic time in seconds."""

    def __init__(self, pid: int, state: str, now: float, program: str | None = None) -> None:
        """`state` is a letter as in /proc/PID/stat."""
        self._pid = pid
        self._end = now + LIMIT_S
        self._output: IO[bytes] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        program = program if program is not None else find_py_spy()
        if program is None or state in ("", "Z", "X", "t"):  # a debugger has it
            return
        how = "--nonblocking" if state in _HELD else "--native"
        try:
            self._output = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
            self._child = subprocess.Popen(
                [program, "dump", how, "--json", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            self.close()

    def is_done(self, now: float) -> bool:
        """Whether it has ended, or will not be waited for any longer."""
        return self._child is None or self._child.poll() is not None or now >= self._end

    def result(self) -> StacksSeen | None:
        """What it has seen; None if it is not there, may not look, or did not end in time. Ends it."""
        child, output = self._child, self._output
        try:
            if child is None or output is None or child.poll() != 0:
                return None
            output.seek(0)
            return parse_spied(output.read(_MOST_PY_SPY_BYTES), self._pid)
        finally:
            self.close()

    def close(self) -> None:
        """End it. The process that it holds goes on."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with suppress(subprocess.TimeoutExpired):  # it may be stuck in the kernel, as the process it looks at
                child.wait(_KILLED_S)
        if self._output is not None:
            self._output.close()
            self._output = None


def find_py_spy() -> str | None:
    """Beside this Python, or on the PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def parse_spied(data: bytes, pid: int) -> StacksSeen | None:
    """What `py-spy dump --json` has printed; None if it is something else. The main thread has the process's number."""
    try:
        threads = msgspec.json.decode(data, type=list[_ThreadStack])
    except (msgspec.DecodeError, RecursionError):
        return None
    main = next((thread for thread in threads if thread.os_thread_id == pid), threads[0] if threads else None)
    if main is None:
        return None
    linecache.checkcache()
    native: list[StackLine] = []
    stack: list[StackLine] = []
    for frame in main.frames:
        line = _py_spy_line(frame)
        if not _is_native(frame):
            if not is_around_collectives(frame.filename):
                stack.append(line)
        elif not stack and not frame.name.startswith("0x"):
            native.append(line)
    others = [ThreadSeen(thread.thread_name or "", at=_place(thread)) for thread in threads if thread is not main]
    return StacksSeen(stack[:MOST_LINES], native[:_MOST_NATIVE], others[:_MOST_OTHERS])


def _is_native(frame: _StackFrame) -> bool:
    """An interpreter that was built with debugging information has lines of C."""
    return frame.line <= 0 or frame.filename.endswith(_NATIVE)


def _py_spy_line(frame: _StackFrame) -> StackLine:
    if _is_native(frame):
        return StackLine(frame.filename, 0, frame.name)
    text = linecache.getline(frame.filename, frame.line).strip()[:200]
    return StackLine(frame.filename, frame.line, frame.name.rpartition(".")[2], text)


def _place(thread: _ThreadStack) -> str:
    """The innermost line of the user's own files; where there is none, of any file."""
    lines = [_py_spy_line(frame) for frame in thread.frames if not _is_native(frame)]
    line = next((line for line in lines if is_users(line.shown)), lines[0] if lines else None)
    return line.short if line is not None else ""


LOOK_S = 1.0
"""How long a rank has to answer, and over which its use of the processor is measured."""
_MOST_BYTES = 64 << 10


class StackLook:
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

    def result(self) -> StacksSeen:
        """What it has shown, once it is due."""
        assert self._busy is not None
        state = _stat(self._pid)[0]
        if self._answer:
            return StacksSeen(self._answer, [], [], state, self._busy)
        threads = threads_of(self._pid)
        seen = self._spy.result() if self._spy is not None else None
        if seen is None:
            return StacksSeen([], [], threads, state, self._busy)
        return seen._replace(threads=[*threads[:1], *seen.threads], state=state, busy=self._busy)

    def close(self) -> None:
        """End py-spy if it still runs, without a result."""
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
        fields = stat_fields(Path(f"/proc/{pid}"))
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return "", 0


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
