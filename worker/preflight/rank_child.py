"""A process that runs one test after the other. It can be killed when a CUDA call or a collective in it hangs.

The parent has imported torch, so the child starts in milliseconds. The parent must not have used CUDA nor computed with
torch, since neither works after a fork. All tests of a child share one CUDA context, which takes up to a second to
make.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Literal, NoReturn

import msgspec
import psutil

from ...core.host import die_with_parent
from ...core.tell import flush_streams

# The exception of a failed check.


class ProbeFailure(Exception):
    """`peers` is None for this rank's own fault, [] for an unknown rank's fault, else the ranks to blame.

    `next` is one sentence on what to try next.
    """

    def __init__(self, detail: str, peers: list[int] | None = None, next: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.peers = peers
        self.next = next


Say = Callable[[str], None]
Perform = Callable[[bytes, Say], Any]
"""What the child does with a request. It calls `say` with each step, and returns a value that msgspec can encode."""

_KILLED_S = 5.0
"""Time for a killed process to end. One that is blocked in a driver never ends, and is abandoned."""
_LAST_WORDS = 20000


class ChildFailure(msgspec.Struct, frozen=True):
    """A ProbeFailure in the child."""

    detail: str
    peers: list[int] | None = None
    next: str = ""


class TestEnding(msgspec.Struct, frozen=True):
    """How a test ended. `detail` says it in words. `said` is the last step that it began."""

    kind: Literal["ok", "raised", "died", "hung"]
    detail: str
    seconds: float
    failure: ChildFailure | None = None
    """For `raised`: the child's ProbeFailure. None for any other exception."""
    ours: bool = False
    """For `raised`: an error of gpuwatch's own test, of a type that neither torch nor the system raises."""
    said: str = ""
    value: bytes = b"null"
    """For `ok`: the returned value, as JSON."""
    output: str = ""
    """The end of the child's output in this test, if the test failed."""


class _ChildSaid(msgspec.Struct, tag="said"):
    step: str


class _ChildRaised(msgspec.Struct, tag="raised"):
    detail: str
    failure: ChildFailure | None = None
    ours: bool = False


class _ChildReturned(msgspec.Struct, tag="returned"):
    value: msgspec.Raw


_Last = _ChildRaised | _ChildReturned | Literal["closed", "late"]

_decoder = msgspec.json.Decoder(_ChildSaid | _ChildRaised | _ChildReturned)


@dataclass(frozen=True)
class _ChildProcess:
    """A running child, and the parent's ends of its pipes."""

    child: psutil.Process
    requests: int
    answers: int
    output: IO[bytes]


class RankChild:
    """A child process for tests. It starts with the first test. If a test fails, the next one gets a new process.

    `perform` runs in the child. A request has no newline.
    """

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._process: _ChildProcess | None = None

    def run(self, request: bytes, deadline_s: float, on_line: Say = lambda step: None) -> TestEnding:
        """Run one test. Its steps are passed on as they begin."""
        began = time.monotonic()
        process = self._process or self._start()
        written = os.fstat(process.output.fileno()).st_size
        try:
            _ask(process.requests, request)
            said, last = _follow(process.answers, began + deadline_s, on_line)
        except BaseException:
            self._end(at_once=True)
            raise
        if isinstance(last, _ChildReturned):
            return TestEnding("ok", "", _since(began), said=said, value=bytes(last.value))
        output = os.dup(process.output.fileno())
        try:
            ended = self._end(at_once=last == "late")
            words = _tail(output, written)
        finally:
            os.close(output)
        seconds = _since(began)
        if isinstance(last, _ChildRaised):
            return TestEnding("raised", last.detail, seconds, last.failure, last.ours, said, output=words)
        if last == "closed":
            line = next((line for line in reversed(words.splitlines()) if line.strip()), "")
            detail = f"{ended}: {line[:500]}" if line else ended
            return TestEnding("died", detail, seconds, said=said, output=words)
        where = f" at {said}" if said else ""
        return TestEnding("hung", f"hung{where} for {deadline_s:.0f} s{ended}", seconds, said=said, output=words)

    def close(self) -> None:
        """End the child, which frees its CUDA context and its memory. Does nothing if there is no child."""
        if self._process is not None:
            self._end(at_once=False)

    def _start(self) -> _ChildProcess:
        output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        requests_read, requests_write = os.pipe()
        answers_read, answers_write = os.pipe()
        parent = os.getpid()
        flush_streams()
        try:
            pid = os.fork()
        except BaseException:
            for fd in (requests_read, requests_write, answers_read, answers_write):
                os.close(fd)
            output.close()
            raise
        if pid == 0:
            os.close(requests_write)
            os.close(answers_read)
            _run_child(self._perform, requests_read, answers_write, output.fileno(), parent)
        os.close(requests_read)
        os.close(answers_write)
        try:
            os.setpgid(pid, pid)  # called here and in the child, since either may run first
        except OSError:
            pass  # it was the child
        self._process = _ChildProcess(psutil.Process(pid), requests_write, answers_read, output)
        return self._process

    def _end(self, *, at_once: bool) -> str:
        """How the child ended, in words."""
        process, self._process = self._process, None
        assert process is not None
        os.close(process.requests)
        os.close(process.answers)
        process.output.close()
        return _see_off(process.child, at_once=at_once)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 4)


def _ask(requests: int, request: bytes) -> None:
    try:
        os.write(requests, request + b"\n")
    except BrokenPipeError:
        pass  # it died between two tests: reading its closed pipe will show that


def _follow(fd: int, deadline: float, on_line: Say) -> tuple[str, _Last]:
    """(last step, how it ended). Returns when the test has ended, the child has died or the deadline has passed."""
    said = ""
    with open(fd, "rb", buffering=0, closefd=False) as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        rest = b""
        while selector.select(max(0.0, deadline - time.monotonic())):
            data = pipe.read(1 << 16)
            if not data:
                return said, "closed"
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = _decoder.decode(line)
                if not isinstance(message, _ChildSaid):
                    return said, message
                said = message.step
                on_line(said)
    return said, "late"


def _see_off(child: psutil.Process, *, at_once: bool) -> str:
    """End the child and all processes that it has started. Returns how it ended, in words."""
    code: int | None = None
    if not at_once:  # it has closed its pipe or sent its result, so it ends within microseconds
        try:
            code = child.wait(timeout=_KILLED_S)
        except psutil.TimeoutExpired:
            at_once = True
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # no process is left in its group
    if at_once:
        try:
            child.wait(timeout=_KILLED_S)
        except psutil.TimeoutExpired:
            return f" and cannot be killed: process {child.pid} is left behind"
        return ""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _tail(output: int, begin: int) -> str:
    """The output since `begin`. Does not move the file's offset, at which the child writes."""
    size = os.fstat(output).st_size
    begin = max(begin, size - _LAST_WORDS)
    return os.pread(output, size - begin, begin).decode(errors="replace").strip()


def _run_child(perform: Perform, requests: int, answers: int, output: int, parent: int) -> NoReturn:
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
        with open(requests, "rb", closefd=False) as lines:
            while request := lines.readline():
                if not _answer(perform, request, answers):
                    break
            else:
                code = 0
        flush_streams()
    finally:
        os._exit(code)  # no destructor of a process group or of CUDA, which may hang


def _answer(perform: Perform, request: bytes, answers: int) -> bool:
    """Whether the test succeeded, so that the next one can run in the same process."""

    def tell(message: msgspec.Struct) -> None:
        data = msgspec.json.encode(message) + b"\n"
        while data:
            data = data[os.write(answers, data) :]

    try:
        tell(_ChildReturned(msgspec.Raw(msgspec.json.encode(perform(request, lambda step: tell(_ChildSaid(step)))))))
    except ProbeFailure as failure:
        tell(_ChildRaised(failure.detail, ChildFailure(failure.detail, failure.peers, failure.next)))
        return False
    except Exception as error:
        traceback.print_exc()
        ours = not isinstance(error, (RuntimeError, OSError, MemoryError, ValueError))
        tell(_ChildRaised(f"{type(error).__name__}: {error}".strip()[:2000], None, ours))
        return False
    return True
