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

from ...core.events.rank_standing import StackLine, ThreadSeen
from ...core.host import stat_fields
from ...core.recorder import stalls

# What Linux says of the threads of a process that does not answer: state, and what they wait for in the kernel.

MOST_THREADS = 16
_X86_64 = (
    "0=read 1=write 7=poll 16=ioctl 23=select 24=sched_yield 35=nanosleep 45=recvfrom 47=recvmsg 61=wait4 72=fcntl "
    "73=flock 74=fsync 75=fdatasync 202=futex 230=clock_nanosleep 232=epoll_wait 257=openat 271=ppoll"
)
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
                waits_in = _line(task / "wchan").strip("0")  # 0 where it does not wait, or may not be seen
                found.append(ThreadSeen(_line(task / "comm"), state, waits_in, _system_call(task)))
    return found


def _system_call(task: Path) -> str:
    """`clock_nanosleep`; on another architecture its number. (man 5 proc, /proc/PID/syscall)"""
    number = _line(task / "syscall").partition(" ")[0]
    if not number.isdigit():  # it runs, or may not be seen
        return ""
    names = dict(entry.split("=") for entry in _X86_64.split()) if platform.machine() == "x86_64" else {}
    return names.get(number, f"number {number}")


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
    """The result of one look at a process. The fields are those of RankLook."""

    stack: list[StackLine]
    native: list[StackLine]
    threads: list[ThreadSeen]
    state: str = ""
    busy: float = 0.0


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
        if line.line:
            if not stalls.is_around_collectives(line.file):
                stack.append(line)
        elif not stack and not line.function.startswith("0x"):
            native.append(line)
    others = [ThreadSeen(thread.thread_name or "", at=_place(thread)) for thread in threads if thread is not main]
    return StacksSeen(stack[: stalls.MOST_LINES], native[:_MOST_NATIVE], others[:_MOST_OTHERS])


def _py_spy_line(frame: _StackFrame) -> StackLine:
    """Line 0: it is native. An interpreter that was built with debugging information has lines of C."""
    if frame.line <= 0 or frame.filename.endswith(_NATIVE):
        return StackLine(frame.filename, 0, frame.name)
    text = linecache.getline(frame.filename, frame.line).strip()[:200]
    return StackLine(frame.filename, frame.line, frame.name.rpartition(".")[2], text)


def _place(thread: _ThreadStack) -> str:
    """The innermost line of the user's own files; where there is none, of any file."""
    lines = [line for line in map(_py_spy_line, thread.frames) if line.line]
    line = next((line for line in lines if stalls.is_users(line.shown)), lines[0] if lines else None)
    return line.short if line is not None else ""


LOOK_S = 1.0
"""How long a rank has to answer, and over which its use of the processor is measured."""
IN_C_S = 0.05
"""A main thread that has had the processor for so long, or sleeps so long after it was asked, runs no Python."""
_MOST_BYTES = 64 << 10
_MOST_FATAL_BYTES = 1 << 20
"""Of all threads: faulthandler writes 100 of them, with 100 calls each."""


class StackLook:
    """One look at one process: made at `now`, finished by `result` about `LOOK_S` later.

    Later by up to py-spy's limit where the process does not answer and py-spy is there.
    """

    def __init__(self, folder: Path, rank: int, attempt: int, pid: int, now: float) -> None:
        self._file = folder / stalls.stack_file_name(rank, attempt)
        self._pid = pid
        self._began = now
        self._ticks = _stat(pid)[1]
        self._main_ticks = _stat(pid, main=True)[1]
        self._again: float | None = None
        """When it was asked by the signal that is for code in C."""
        self._size = _size(self._file)
        self._busy: float | None = None
        """Share of one core, once the process has had its time to answer."""
        self._answer: list[StackLine] = []
        self.spy: PySpy | None = None
        """It is at work for this look."""
        self._signals = _signals(pid, self._file)
        self.was_asked = self._signals is not None
        if self._signals is not None:
            _send(pid, self._signals.in_python)

    def is_due(self, now: float, *, may_spy: bool = True, look_s: float = LOOK_S) -> bool:
        """Whether it has had its time. `may_spy`: py-spy may be asked, should the process not have answered."""
        self.ask_again(now)
        if now - self._began < look_s or (self._again is not None and now - self._again < IN_C_S):
            return False
        if self._busy is None:
            state, ticks = _stat(self._pid)
            spent_s = (ticks - self._ticks) / os.sysconf("SC_CLK_TCK")
            self._busy = round(max(0.0, spent_s / (now - self._began)), 2)
            self._answer = stalls.parse_stack(_read_from(self._file, self._size)[0], linecache.getline)
            if not self._answer and may_spy:
                self.spy = PySpy(self._pid, state, now)
        return self.spy is None or self.spy.is_done(now)

    def ask_again(self, now: float) -> None:
        """Ask a rank whose main thread is in code in C, and so has not come to the handler in Python.

        Not one that may run Python: see core/recorder/stalls.py. One that was stopped meanwhile, or has had no
        processor, may.
        """
        if self._signals is None or self._again is not None or now - self._began < IN_C_S or self.size:
            return
        state, ticks = _stat(self._pid, main=True)
        spent_s = (ticks - self._main_ticks) / os.sysconf("SC_CLK_TCK")
        if (state in ("S", "D") or spent_s >= IN_C_S) and _signals(self._pid, self._file) is not None:
            self._again = now
            _send(self._pid, self._signals.in_c)

    @property
    def size(self) -> int:
        """Bytes of its answer so far."""
        return max(0, _size(self._file) - self._size)

    def result(self) -> StacksSeen:
        """What it has shown, once it is due."""
        assert self._busy is not None
        state = _stat(self._pid)[0]
        if self._answer:
            return StacksSeen(self._answer, [], [], state, self._busy)
        threads = threads_of(self._pid)
        seen = self.spy.result() if self.spy is not None else None
        if seen is None:
            return StacksSeen([], [], threads, state, self._busy)
        return seen._replace(threads=[*threads[:1], *seen.threads], state=state, busy=self._busy)

    def close(self) -> None:
        """End py-spy if it still runs, without a result."""
        if self.spy is not None:
            self.spy.close()


def fatal_stacks(folder: Path, rank: int, attempt: int) -> tuple[stalls.FatalStacks, int]:
    """Where a rank stood when a fatal signal ended it, and when that was (nanoseconds); 0 if it left no stack."""
    file = folder / stalls.stack_file_name(rank, attempt)
    text, when_ns = _read_from(file, max(0, _size(file) - _MOST_FATAL_BYTES), _MOST_FATAL_BYTES)
    stacks = stalls.parse_fatal(text, linecache.getline)
    return stacks, when_ns if any(stacks) else 0


def _read_from(file: Path, start: int, most: int = _MOST_BYTES) -> tuple[str, int]:
    """(the text behind `start`, when it was written); ("", 0) if it cannot be read."""
    linecache.checkcache()
    with suppress(OSError), file.open("rb") as opened:
        opened.seek(start)
        text = opened.read(most).decode("utf-8", "replace")
        return text, os.fstat(opened.fileno()).st_mtime_ns
    return "", 0


def _signals(pid: int, file: Path) -> stalls.AskingSignals | None:
    """The signals, if the process has our handlers: without them, a signal would end it."""
    signals = stalls.asking_signals()
    if signals is None or not _is_ours(file) or not all(_catches(pid, number) for number in signals):
        return None
    return signals


def _send(pid: int, number: int) -> None:
    """Signal the main thread, which has the process's own number."""
    try:
        ctypes.CDLL(None).tgkill(pid, pid, number)
    except AttributeError:  # another C library than glibc, or one before 2.30
        with suppress(OSError):
            os.kill(pid, number)


def _is_ours(file: Path) -> bool:
    """Whether the handlers are those of worker/answers.py. Another one could end the process."""
    with suppress(OSError):
        return bool(file.stat().st_mode & stalls.MAY_BE_ASKED)
    return False


def _catches(pid: int, number: int) -> bool:
    """SigCgt in /proc/PID/status: a mask of the signals that the process has handlers for. (man 5 proc)"""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
        return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def _stat(pid: int, *, main: bool = False) -> tuple[str, int]:
    """(state, clock ticks used) of a process, or of its main thread; ("", 0) if it cannot be read.

    (man 5 proc, /proc/PID/stat; the state of a process is that of its main thread)
    """
    with suppress(OSError, ValueError, IndexError):
        fields = stat_fields(Path(f"/proc/{pid}/task/{pid}" if main else f"/proc/{pid}"))
        return fields[0], int(fields[11]) + int(fields[12])
    return "", 0


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0
