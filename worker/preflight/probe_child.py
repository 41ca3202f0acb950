"""The child of a coordinator, which runs one test after the other.

It can be killed when a CUDA call or a collective in it hangs. The coordinator has imported torch, so the child starts
in milliseconds. All tests of a child share one CUDA context, which takes up to a second to make.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, Literal, NoReturn

import psutil

from ...core.guest.tell import flush_streams
from ...core.host import die_with_parent


class ProbeFailure(Exception):
    """A check has failed.

    `peers` is None for this rank's own fault, [] for an unknown rank's fault, else the ranks to blame. `next` is one
    sentence on what to try next.
    """

    def __init__(self, detail: str, peers: list[int] | None = None, next: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.peers = peers
        self.next = next


_KILLED_S = 5.0
"""Time for a killed process to end. One that is blocked in a driver never ends, and is abandoned."""
_LAST_WORDS = 20000


@dataclass(frozen=True)
class TestEnding:
    """How a test ended. `detail` says it in words. `said` is the last step that it began."""

    kind: Literal["ok", "raised", "died", "hung"]
    detail: str = ""
    failure: ProbeFailure | None = None
    """For `raised`: None for any other exception."""
    ours: bool = False
    """For `raised`: an error of gpuwatch's own test, of a type that neither torch nor the system raises."""
    said: str = ""
    value: Any = None
    """For `ok`: the result of the test."""
    output: str = ""
    """The end of the child's output in this test, if the test failed."""


Say = Callable[[str], None]
Answer = Callable[[str | TestEnding], None]
Perform = Callable[[Any, Answer], Any]
"""What the child does with a request. It answers with each step, and may answer with the test's ending from another
thread. Both the request and its result are pickled."""


@dataclass(frozen=True)
class _ChildProcess:
    """A running child, and the parent's end of its pipe: requests go in, answers come out."""

    child: psutil.Process
    pipe: Connection
    output: IO[bytes]


class RankChild:
    """A child process for tests. It starts with the first test. If a test fails, the next one gets a new process.

    `perform` runs in the child.
    """

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._process: _ChildProcess | None = None

    def run(self, request: object, deadline_s: float, on_line: Say = lambda step: None) -> TestEnding:
        """Run one test. Its steps are passed on as they begin."""
        process = self._process or self._start()
        written = os.fstat(process.output.fileno()).st_size
        try:
            with suppress(ConnectionError):  # it died between two tests: reading its closed pipe will show that
                process.pipe.send(request)
            ending = _follow(process.pipe, time.monotonic() + deadline_s, on_line)
        except BaseException:
            self._end(at_once=True)
            raise
        if ending.kind != "ok":
            output = os.dup(process.output.fileno())
            try:
                ended = self._end(at_once=ending.kind == "hung")
                ending = replace(ending, output=_tail(output, written))
            finally:
                os.close(output)
        if ending.kind == "died":
            line = next((line for line in reversed(ending.output.splitlines()) if line.strip()), "")
            ending = replace(ending, detail=f"{ended}: {line[:500]}" if line else ended)
        if ending.kind == "hung":
            where = f" at {ending.said}" if ending.said else ""
            ending = replace(ending, detail=f"hung{where} for {deadline_s:.0f} s{ended}")
        return ending

    def close(self) -> None:
        """End the child, which frees its CUDA context and its memory. Does nothing if there is no child."""
        if self._process is not None:
            self._end(at_once=False)

    def _start(self) -> _ChildProcess:
        output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        ours, theirs = Pipe()
        parent = os.getpid()
        flush_streams()
        try:
            pid = os.fork()
        except BaseException:
            for end in (ours, theirs, output):
                end.close()
            raise
        if pid == 0:
            ours.close()
            _run_child(self._perform, theirs, output.fileno(), parent)
        theirs.close()
        with suppress(OSError):  # called here and in the child, since either may run first
            os.setpgid(pid, pid)
        self._process = _ChildProcess(psutil.Process(pid), ours, output)
        return self._process

    def _end(self, *, at_once: bool) -> str:
        """How the child ended, in words."""
        process, self._process = self._process, None
        assert process is not None
        process.pipe.close()
        process.output.close()
        return _see_off(process.child, at_once=at_once)


def _follow(pipe: Connection, deadline: float, on_line: Say) -> TestEnding:
    """Returns when the test has ended, the child has died or the deadline has passed."""
    said = ""
    try:
        while pipe.poll(max(0.0, deadline - time.monotonic())):
            answer = pipe.recv()
            if isinstance(answer, TestEnding):
                return replace(answer, said=said)
            said = answer
            on_line(said)
    except (EOFError, ConnectionResetError):
        return TestEnding("died", said=said)
    return TestEnding("hung", said=said)


def _see_off(child: psutil.Process, *, at_once: bool) -> str:
    """End the child and all processes that it has started. Returns how it ended, in words."""
    code: int | None = None
    if not at_once:  # it has closed its pipe or sent its result, so it ends within microseconds
        try:
            code = child.wait(timeout=_KILLED_S)
        except psutil.TimeoutExpired:
            at_once = True
    with suppress(ProcessLookupError, PermissionError):  # no process is left in its group
        os.killpg(child.pid, signal.SIGKILL)
    if at_once:
        try:
            child.wait(timeout=_KILLED_S)
        except psutil.TimeoutExpired:
            return f" and cannot be killed: process {child.pid} is left behind"
        return ""
    return exit_text(code)


def exit_text(code: int | None) -> str:
    """How a process has ended: `killed by SIGSEGV`, `exit code 1`."""
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _tail(output: int, begin: int) -> str:
    """The output since `begin`. Does not move the file's offset, at which the child writes."""
    size = os.fstat(output).st_size
    begin = max(begin, size - _LAST_WORDS)
    return os.pread(output, size - begin, begin).decode(errors="replace").strip()


def _run_child(perform: Perform, pipe: Connection, output: int, parent: int) -> NoReturn:
    """Run the child. Never returns into the parent's code."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        try:
            while _answer(perform, pipe.recv(), pipe):
                pass
        except (EOFError, ConnectionResetError):  # the parent has closed its end
            code = 0
        flush_streams()
    finally:
        os._exit(code)  # no destructor of a process group or of CUDA, which may hang


def _answer(perform: Perform, request: object, answers: Connection) -> bool:
    """Whether the test succeeded, so that the next one can run in the same process."""
    try:
        answers.send(TestEnding("ok", value=perform(request, answers.send)))
        return True
    except ProbeFailure as failure:
        ending = TestEnding("raised", failure.detail, failure=failure)
    except Exception as error:
        traceback.print_exc()
        ours = not isinstance(error, (RuntimeError, OSError, MemoryError, ValueError))
        ending = TestEnding("raised", f"{type(error).__name__}: {error}".strip()[:2000], ours=ours)
    answers.send(ending)
    return False
