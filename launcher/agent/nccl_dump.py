"""Asks a rank's torch for its flight recorder of NCCL, and reads it: see core/recorder/flight_recorder.py."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from ...core.recorder.flight_recorder import DeviceProgress, file_of, pipe_of, read_dump

ANSWER_S = 6.0
"""torch looks at its pipe about once a second, and writes some megabytes."""
_MOST_BYTES = 64 << 20


class NcclDump:
    """One request to one rank, made at `now` (monotonic seconds)."""

    def __init__(self, folder: Path, rank: int, pid: int, now: float) -> None:
        """`folder` is that of the node's recorders."""
        self._file = file_of(folder, rank)
        self._end = now + ANSWER_S
        self._found: dict[str, DeviceProgress] | None = None
        with suppress(OSError):
            # torch has written it by itself, at a timeout, and the user may want it
            self._file.rename(self._file.with_name(f"{self._file.name}.at-timeout"))
        self._is_asked = _ask(pipe_of(folder, rank), pid)

    def is_due(self, now: float) -> bool:
        """Whether it has answered, or will not."""
        if self._is_asked and self._found is None:
            self._found = read_dump(_whole(self._file))
            if self._found is not None:
                self._file.unlink(missing_ok=True)
        return not self._is_asked or self._found is not None or now >= self._end

    def result(self) -> dict[str, DeviceProgress] | None:
        """By the groups' names; None if it has not answered."""
        return self._found


def _ask(pipe: Path, pid: int) -> bool:
    """False where that process does not read the pipe: torch makes none there, or a child of it has made its own."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISFIFO(found.st_mode) or not _has_open(pid, found):
            return False
        os.write(fd, b"1\n")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _has_open(pid: int, file: os.stat_result) -> bool:
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
        for one in descriptors:
            with suppress(OSError):
                if os.path.samestat(os.stat(one.path), file):  # noqa: PTH116  # without an object for each
                    return True
    return False


def _whole(file: Path) -> bytes:
    """What it has; b"" while there is none, or not all of it: a pickle ends in a period."""
    with suppress(OSError), file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - 1))
        if opened.read(1) == b"." and size <= _MOST_BYTES:
            opened.seek(0)
            return opened.read()
    return b""
