"""Reads a whole file that anybody may have put there: a FIFO or a device is none, and no file is larger than memory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def expect_regular(path: Path) -> None:
    """Raise OSError where there is no file, or what reading would wait for."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: Path, most_bytes: int) -> bytes:
    """All of it. Raises OSError as `expect_regular` does, and where there are more bytes."""
    expect_regular(path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123  # a descriptor
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and {most_bytes} are the most", str(path))
        try:
            return file.read(most_bytes)
        except MemoryError:
            raise OSError(errno.ENOMEM, f"its {size} bytes are more than there is memory for", str(path)) from None
