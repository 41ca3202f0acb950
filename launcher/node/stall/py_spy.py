"""The stack of a process that does not answer, by py-spy: where that is installed, and allowed to look at it.

py-spy --native holds the process for as long as it reads. A process that is stopped, or that no signal reaches, is read
as it stands. (github.com/benfred/py-spy)
"""

from __future__ import annotations

import linecache
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from ....core.records import StackLine, ThreadSeen
from ....core.stalls import MOST_LINES, is_around_collectives, is_users

LIMIT_S = 3.0
_KILLED_S = 1.0
_MOST_BYTES = 4 << 20
_NATIVE = (".c", ".h", ".cc", ".cpp", ".cxx", ".S")
_MOST_NATIVE = 8
_MOST_OTHERS = 16
_HELD = "TD"
"""States in which a process cannot be held."""


class _Frame(msgspec.Struct, frozen=True):
    name: str
    filename: str
    line: int = 0


class _Thread(msgspec.Struct, frozen=True):
    os_thread_id: int | None = None
    thread_name: str | None = None
    frames: list[_Frame] = []


class Spied(NamedTuple):
    """What py-spy has seen."""

    stack: list[StackLine]
    """Of the main thread: Python's calls, innermost first."""
    native: list[StackLine]
    """Native calls inside of the innermost of them, innermost first."""
    others: list[ThreadSeen]
    """Other threads that Python knows."""


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

    def result(self) -> Spied | None:
        """What it has seen; None if it is not there, may not look, or did not end in time. Ends it."""
        child, output = self._child, self._output
        try:
            if child is None or output is None or child.poll() != 0:
                return None
            output.seek(0)
            return parse_spied(output.read(_MOST_BYTES), self._pid)
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


def parse_spied(data: bytes, pid: int) -> Spied | None:
    """What `py-spy dump --json` has printed; None if it is something else. The main thread has the process's number."""
    try:
        threads = msgspec.json.decode(data, type=list[_Thread])
    except (msgspec.DecodeError, RecursionError):
        return None
    main = next((thread for thread in threads if thread.os_thread_id == pid), threads[0] if threads else None)
    if main is None:
        return None
    linecache.checkcache()
    native: list[StackLine] = []
    stack: list[StackLine] = []
    for frame in main.frames:
        line = _line(frame)
        if not _is_native(frame):
            if not is_around_collectives(frame.filename):
                stack.append(line)
        elif not stack and not frame.name.startswith("0x"):
            native.append(line)
    others = [ThreadSeen(thread.thread_name or "", at=_place(thread)) for thread in threads if thread is not main]
    return Spied(stack[:MOST_LINES], native[:_MOST_NATIVE], others[:_MOST_OTHERS])


def _is_native(frame: _Frame) -> bool:
    """An interpreter that was built with debugging information has lines of C."""
    return frame.line <= 0 or frame.filename.endswith(_NATIVE)


def _line(frame: _Frame) -> StackLine:
    if _is_native(frame):
        return StackLine(frame.filename, 0, frame.name)
    text = linecache.getline(frame.filename, frame.line).strip()[:200]
    return StackLine(frame.filename, frame.line, frame.name.rpartition(".")[2], text)


def _place(thread: _Thread) -> str:
    """The innermost line of the user's own files; where there is none, of any file."""
    lines = [_line(frame) for frame in thread.frames if not _is_native(frame)]
    line = next((line for line in lines if is_users(line.shown)), lines[0] if lines else None)
    return line.short if line is not None else ""
