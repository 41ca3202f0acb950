"""Descriptors of gpuwatch's own within the user's process.

A script may close descriptors that it has not opened (os.closerange, a daemon's loop), and the kernel gives the lowest
free number to the next file: the script's checkpoint. So a number is moved to where the kernel gives out none while
lower ones are free, and it is used and closed only while it still is the file that was opened.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..signal_errors import from_outside, suppress_own
from .tell import STANDARD_STREAMS, take_standard_streams

_HIGHEST = 1 << 14
"""A higher number makes the kernel's table of descriptors large, which each fork copies."""
_LOWEST = 256
"""A script may have this many files of its own."""
_ROOM = 64


class OwnDescriptor:
    """A file that gpuwatch holds open. Raises OSError where it cannot be opened."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        opened = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self.number = _moved(opened)
        self._opened = os.fstat(self.number)

    @property
    def is_out_of_reach(self) -> bool:
        """Whether no file of the script's gets this number, should the script close it."""
        return self.number >= _LOWEST

    @property
    def is_ours(self) -> bool:
        """Whether the number still is the file that was opened."""
        with suppress_own(OSError):
            return os.path.samestat(os.fstat(self.number), self._opened)
        return False

    def close(self) -> None:
        """Close the descriptor, unless someone else has closed it and its number now belongs to another file."""
        if self.is_ours:
            os.close(self.number)


def _moved(opened: int) -> int:
    """The same file under a high number; where that cannot be, under one that is no standard stream's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _HIGHEST if soft == resource.RLIM_INFINITY else min(soft, _HIGHEST)
    least = [most - _ROOM] if most - _ROOM >= _LOWEST else []
    for lowest in [*least, STANDARD_STREAMS] if opened < STANDARD_STREAMS else least:
        with suppress_own(OSError):
            number = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, lowest)
            os.close(opened)
            return number
    return opened


class RecorderMap(mmap.mmap):
    """A mapped file of which no descriptor is left.

    Up to Python 3.12, a map holds a copy of the descriptor and closes that number at its end, whatever file it is by
    then. So the copy is closed at once, and the number is taken again for the moment in which the map closes it.
    (docs.python.org/3/library/mmap.html, `trackfd`)
    """

    _number: int = -1

    def __new__(cls, fd: int, size: int) -> RecorderMap:
        """Map the whole of a file that was just made. Raises OSError."""
        if sys.version_info >= (3, 13):
            return super().__new__(cls, fd, size, trackfd=False)
        with standard_streams_taken():
            made = super().__new__(cls, fd, size)
            made._number = _copy_of(fd)
            os.close(made._number)
        return made

    def close(self) -> None:
        """Unmap. Where the number is the script's by now, the memory stays mapped until the process ends."""
        if self.closed or not self._take_number():
            return
        try:
            super().close()
        except BufferError:
            if self._number >= 0:
                os.close(self._number)
            raise
        self._number = -1

    def __del__(self) -> None:
        if not self.closed and not self._take_number():
            with suppress(ImportError):  # Python ends, and imports nothing any more
                import ctypes

                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # it lives on, and closes nothing

    def _take_number(self) -> bool:
        """Whether the map may close its number: it has none, or the number is a file of ours."""
        if self._number < 0:
            return True
        opened: set[int] = set()
        with suppress_own(OSError):
            opened.add(nothing := os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            if nothing != self._number:
                opened.add(fcntl.fcntl(nothing, fcntl.F_DUPFD_CLOEXEC, self._number))
        for number in opened - {self._number}:
            os.close(number)
        return self._number in opened


@contextmanager
def standard_streams_taken() -> Iterator[None]:
    """No file of ours gets the number of a closed stdin, stdout or stderr, which C libraries print into."""
    taken = take_standard_streams()
    try:
        yield
    finally:
        for number in taken:
            os.close(number)


def _copy_of(fd: int) -> int:
    """The other descriptor of a file that was just made: the map has taken the lowest free number for it."""
    wanted, number = os.fstat(fd), 0
    while True:
        with suppress_own(OSError):
            if number != fd and os.path.samestat(os.fstat(number), wanted):
                return number
        number += 1


# Whole files. Anybody may have put one there: a FIFO or a device is none, and no file is larger than memory.


def expect_regular(path: Path) -> None:
    """Raise OSError where there is no file, or what reading would wait for."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_regular(path: Path, most_bytes: int) -> bytes:
    """All of it. Raises OSError as `expect_regular` does, and where there are more bytes."""
    expect_regular(path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123  # a descriptor
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes; the limit is {most_bytes}", str(path))
        try:
            return file.read(most_bytes)
        except MemoryError as error:
            if from_outside(error):
                raise
            raise OSError(errno.ENOMEM, f"its {size} bytes do not fit into memory", str(path)) from None


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file, for this user alone by default: whole, or not at all. Raises OSError."""
    new = path.with_name(f".{path.name}")
    new.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(data)
        new.replace(path)
    except OSError:
        with suppress_own(OSError):
            new.unlink()
        raise
