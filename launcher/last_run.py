"""Where the last run of this user is, for `gpuwatch report`, `stacks` and others in a folder without runs.

A file in the user's folder for state names it: `~/.local/state/gpuwatch/last-run`. It holds a path, and nothing else.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ..core.guest.own_files import read_regular, write_whole
from ..core.signal_errors import suppress_own

_MOST_BYTES = 1 << 16


def remember_run(folder: Path) -> None:
    """Write it down, in a thread: a home folder may be on a disk that does not answer. Nothing tells if it fails."""
    with suppress_own(RuntimeError):  # no thread to be had
        threading.Thread(target=_write, args=(folder,), daemon=True, name="gpuwatch-last-run").start()


def remembered_run() -> Path | None:
    """Its folder, which may be gone; None where nothing was written down, or it cannot be read."""
    with suppress_own(Exception):
        return Path(os.fsdecode(read_regular(_file(), _MOST_BYTES)))
    return None


def _write(folder: Path) -> None:
    with suppress_own(Exception):
        file = _file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(file, os.fsencode(folder))


def _file() -> Path:
    """Raises RuntimeError where this user has no home."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = given if given.is_absolute() else Path.home() / ".local" / "state"
    return state / "gpuwatch" / "last-run"
