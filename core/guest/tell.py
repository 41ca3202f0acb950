"""What gpuwatch prints: onto a full disk, into a pipe that nobody reads, or nowhere. No run ends because of it."""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NoReturn

from ..errors import OutputLost
from ..signal_errors import from_outside, suppress_own

STANDARD_STREAMS = 3


def tell(text: str) -> None:
    """One line on stderr, in one piece. What cannot be printed is dropped, and closed streams stay closed."""
    if sys.stderr is not None:
        with suppress_own(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def say(text: str) -> None:
    """One line for the user, which begins as all of gpuwatch's do; the script's own stdout stays untouched."""
    tell(f"gpuwatch: {text}")


def flush_streams() -> None:
    """Flush stdout and stderr, as far as possible."""
    for stream in (sys.stdout, sys.stderr):
        with suppress_own(OSError, ValueError, AttributeError):
            stream.flush()


def end_process(code: int, longest_s: float | None = None) -> NoReturn:
    """End it as `multiprocessing` ends its children: threads, exit functions, streams, and no module is taken down.

    Waits for threads that are no daemons, at most `longest_s` seconds; None: as long as they take.
    """
    if longest_s is not None:
        late = threading.Timer(longest_s, _leave, (code,))
        late.daemon = True
        late.start()
    threading._shutdown()  # type: ignore[attr-defined]
    _leave(code)


_leaving = threading.Lock()
"""Never released: one thread runs the exit functions."""


def is_leaving() -> bool:
    """Whether `end_process` runs the exit functions. No thread is stopped then."""
    return _leaving.locked()


def _leave(code: int) -> NoReturn:
    _leaving.acquire()
    atexit._run_exitfuncs()
    flush_streams()
    os._exit(code)


def take_standard_streams() -> list[int]:
    """Take the numbers of closed standard streams, for this process alone. Returns them."""
    taken: list[int] = []
    with suppress_own(OSError):
        while (number := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) < STANDARD_STREAMS:
            taken.append(number)
        os.close(number)
    return taken


def guard_streams() -> None:
    """In a process of gpuwatch's own: have stdout and stderr drop what they cannot print, whoever writes to them.

    Not in a rank: its streams are the script's. A closed stream stays closed for the children of this process.
    """
    take_standard_streams()
    sys.stdout, sys.stderr = _GuardedStream(sys.stdout), _GuardedStream(sys.stderr)


def expect_answer(*, drops: bool = False) -> None:
    """What the command prints on stdout is what it was called for: raise OutputLost where that cannot be printed."""
    if isinstance(sys.stdout, _GuardedStream):
        sys.stdout.drops = drops


class _GuardedStream:
    """A text stream, or none; the rest of its methods are the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream: IO[str] | None = stream
        self.drops = True
        self._trouble: OutputLost | None = None

    def __getattr__(self, name: str) -> Any:
        if self._stream is None:
            raise AttributeError(name)
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """All of it, or nothing that matters."""
        if not isinstance(text, str):
            raise TypeError(f"expected text, found {type(text).__name__}")
        with self._guarded() as stream:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode("ascii", "backslashreplace").decode())
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._guarded() as stream:
            stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    @contextmanager
    def _guarded(self) -> Iterator[IO[str]]:
        if self._trouble is not None and not self.drops:  # who writes may have caught it: click tries a stream out
            raise self._trouble
        try:
            yield self._stream or io.StringIO()
        except (OSError, ValueError) as error:
            if from_outside(error):
                raise
            if self.drops or self._stream is None:
                return
            with suppress_own(OSError, ValueError):  # Python prints once more at its end what the stream still holds
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._trouble = OutputLost(error, is_wanted=getattr(error, "errno", 0) != errno.EPIPE)
            raise self._trouble from error
