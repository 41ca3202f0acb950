"""Asks a rank for its flight recorder of NCCL, and reads it: see core/recorder/flight_recorder.py."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ...core.recorder.flight_recorder import DeviceProgress, file_of, pipe_of, read_dump

ANSWER_S = 6.0
"""It needs the rank's GIL, and a moment of a busy machine."""
_MOST_BYTES = 64 << 20


class NcclDump:
    """One question to one rank, asked at `now` (monotonic seconds)."""

    def __init__(self, folder: Path, rank: int, attempt: int, now: float) -> None:
        """`folder` is that of the node's recorders."""
        self._file = file_of(folder, rank, attempt)
        self._end = now + ANSWER_S
        self._found: dict[str, DeviceProgress] | None = None
        with suppress(OSError):
            self._file.unlink()  # a late answer to an earlier question
        self._is_asked = _ask(pipe_of(folder, rank, attempt))

    def is_due(self, now: float) -> bool:
        """Whether it has answered, or will not."""
        if self._is_asked and self._file.exists():  # it is whole, and read once, whatever it is
            self._is_asked = False
            self._found = read_dump(_read(self._file))
            self._file.unlink(missing_ok=True)
        return not self._is_asked or now >= self._end

    def result(self) -> dict[str, DeviceProgress] | None:
        """By the groups' names; None if it has not answered."""
        return self._found


def _ask(pipe: Path) -> bool:
    """False where nobody reads the pipe: torch has no CUDA there, or the rank has ended."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, b"?")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _read(file: Path) -> bytes:
    """b"" if it cannot be read, or is too large."""
    with suppress(OSError):
        return file.read_bytes() if file.stat().st_size <= _MOST_BYTES else b""
    return b""
