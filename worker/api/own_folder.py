"""The folder of a recorder without a launcher. The next one on the host removes it if its owner was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from ...core.recorder.own_files import OwnDescriptor

_PREFIX = "gpuwatch-watch-"
_LOCK = "lock"
_YOUNG_S = 60.0
"""A folder without a lock may be one that is being made."""


class OwnFolder:
    """A folder that this process holds a lock in. The kernel frees the lock when the process ends, however it ends."""

    def __init__(self, base: str | None) -> None:
        """Remove what killed processes have left in `base` (None: the system's temporary folder), then make one."""
        self._pid = os.getpid()
        parent = Path(base or tempfile.gettempdir())
        for left in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_free(left)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        new = self.path / f".{_LOCK}"
        self._lock: OwnDescriptor | None = OwnDescriptor(new, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock.number, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)  # whoever sees a lock file sees it locked

    def remove(self) -> None:
        """Remove it, and let go of the lock. Does nothing in a forked child, and nothing a second time."""
        if os.getpid() != self._pid or self._lock is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        lock.close()


def _remove_if_free(folder: Path) -> None:
    if folder.stat().st_uid != os.getuid():
        return
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time.time() - folder.stat().st_mtime > _YOUNG_S:
            shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner lives
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
