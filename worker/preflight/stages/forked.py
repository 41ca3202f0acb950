"""One stage in a process of its own, that can be ended when it hangs: a CUDA call or a collective cannot be.

The parent has imported torch, so the child starts in milliseconds. It must not have used CUDA nor computed with torch:
neither survives a fork.
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
from typing import IO, Any, Literal, NoReturn, cast

import msgspec
import psutil

from ...orphan import die_with_parent
from .failure import ProbeFailure

Say = Callable[[str], None]

_KILLED_S = 5.0
"""For a killed process to be gone: one that sleeps in a driver never is, and is left behind."""
_LAST_WORDS = 20000


class Failure(msgspec.Struct, frozen=True):
    """A ProbeFailure of the child."""

    detail: str
    peers: list[int] | None = None
    next: str = ""


class Ending(msgspec.Struct, frozen=True):
    """How a child ended. `detail` says it in words, `said` is the last step that it had begun."""

    kind: Literal["ok", "raised", "died", "hung"]
    detail: str
    seconds: float
    failure: Failure | None = None
    """Of `raised`: what the child found out. None: an exception that nobody foresaw."""
    ours: bool = False
    """Of `raised`: an error of the test itself, of a kind that neither torch nor the system raises."""
    said: str = ""
    value: bytes = b"null"
    """Of `ok`: what the call returned, as JSON."""
    output: str = ""
    """The end of what the child has written, if it has not ended well."""


class _Said(msgspec.Struct, tag="said"):
    step: str


class _Raised(msgspec.Struct, tag="raised"):
    detail: str
    failure: Failure | None = None
    ours: bool = False


class _Returned(msgspec.Struct, tag="returned"):
    value: msgspec.Raw


_Last = _Raised | _Returned | Literal["closed", "late"]

_decoder = msgspec.json.Decoder(_Said | _Raised | _Returned)


def run_forked(call: Callable[[Say], Any], deadline_s: float, on_line: Say = lambda step: None) -> Ending:
    """Run `call(say)` in a child. Its result must be of a type that msgspec knows; what it says goes to `on_line`."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        read_fd, write_fd = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            _run_child(call, write_fd, output.fileno(), parent)
        os.close(write_fd)
        try:
            os.setpgid(pid, pid)  # here and in the child: whoever is first
        except OSError:
            pass  # it was the child
        child = psutil.Process(pid)
        said, last = "", cast(_Last, "late")
        try:
            said, last = _follow(read_fd, began + deadline_s, on_line)
        finally:
            os.close(read_fd)
            ended = _end(child, at_once=last == "late")
        seconds = round(time.monotonic() - began, 4)
        if isinstance(last, _Returned):
            return Ending("ok", "", seconds, said=said, value=bytes(last.value))
        words = _tail(output)
        if isinstance(last, _Raised):
            return Ending("raised", last.detail, seconds, last.failure, last.ours, said, output=words)
    if last == "closed":
        line = next((line for line in reversed(words.splitlines()) if line.strip()), "")
        detail = f"{ended}: {line[:500]}" if line else ended
        return Ending("died", detail, seconds, said=said, output=words)
    where = f" at {said}" if said else ""
    return Ending("hung", f"hung{where} for {deadline_s:.0f} s{ended}", seconds, said=said, output=words)


def _follow(fd: int, deadline: float, on_line: Say) -> tuple[str, _Last]:
    """(last step said, how it ended), until the child has ended or the deadline is over."""
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
                if not isinstance(message, _Said):
                    return said, message
                said = message.step
                on_line(said)
    return said, "late"


def _end(child: psutil.Process, *, at_once: bool) -> str:
    """See the child off, with all that it has started; how it ended, in words."""
    code: int | None = None
    if not at_once:  # it has closed its pipe or given its result: its end is a matter of microseconds
        try:
            code = child.wait(timeout=_KILLED_S)
        except psutil.TimeoutExpired:
            at_once = True
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nobody is left in its group
    if at_once:
        try:
            child.wait(timeout=_KILLED_S)
        except psutil.TimeoutExpired:
            return f" and cannot be killed: process {child.pid} is left behind"
        return ""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _LAST_WORDS))
    return output.read().decode(errors="replace").strip()


def _run_child(call: Callable[[Say], Any], pipe: int, output: int, parent: int) -> NoReturn:
    """Never returns into the parent's code, whatever happens."""
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

        def tell(message: msgspec.Struct) -> None:
            os.write(pipe, msgspec.json.encode(message) + b"\n")

        try:
            value = msgspec.Raw(msgspec.json.encode(call(lambda step: tell(_Said(step)))))
            tell(_Returned(value))
            code = 0
        except ProbeFailure as failure:
            tell(_Raised(failure.detail, Failure(failure.detail, failure.peers, failure.next)))
        except Exception as error:
            traceback.print_exc()
            ours = not isinstance(error, (RuntimeError, OSError, MemoryError, ValueError))
            tell(_Raised(f"{type(error).__name__}: {error}".strip()[:2000], None, ours))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # no destructor of a process group or of CUDA, which may hang
