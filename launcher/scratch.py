"""The folder of a node's recorders: in /dev/shm where there is room, private, and removed when the run ends."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import psutil

from ..core.recorder.layout import file_bytes

_PREFIX = "gpuwatch-"
_SHARED_MEMORY = Path("/dev/shm")
_OWNER = "owner"
RESCUED = "rescued"
"""Folder in the scratch for what the runs' folder took no more of."""


def make_scratch(ranks: int) -> Path:
    """Make the folder for `ranks` recorders. Takes at most half of what is free in shared memory, else a disk."""
    remove_stale()
    base = Path(tempfile.gettempdir())
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        stat = os.statvfs(_SHARED_MEMORY)
        if stat.f_bavail * stat.f_frsize > 2 * ranks * file_bytes():
            base = _SHARED_MEMORY
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=base))
    _sign(folder)
    return folder


def lack_of_room(folder: Path, ranks: int) -> str:
    """What to tell the user when the folder cannot hold the recorders of so many ranks; "" when it can."""
    stat_ = os.statvfs(folder)
    free, needed = stat_.f_bavail * stat_.f_frsize, ranks * file_bytes()
    if free >= needed:
        return ""
    return (
        f"{folder.parent} has {free >> 20} MiB free, and the recorders of {ranks} ranks need {needed >> 20} MiB: ranks "
        f"that find no room go on unwatched; make room in {_SHARED_MEMORY}, or set TMPDIR to a disk that has it"
    )


def _sign(folder: Path) -> None:
    new = folder / f".{_OWNER}-{os.getpid()}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(f"{os.getpid()} {psutil.Process().create_time()} {_pid_namespace()}")
    new.replace(folder / _OWNER)


def _pid_namespace() -> int:
    """Where the pid counts: containers on one host may share /dev/shm, and know nothing of each other's processes."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # not on Linux
        return 0


def remove_scratch(folder: Path) -> None:
    """Remove the folder; twice does no harm."""
    shutil.rmtree(folder, ignore_errors=True)


def keep_rescued(scratch: Path) -> Path | None:
    """Move what the runs' folder took no more of to where it stays; None if there is nothing."""
    source = scratch / RESCUED
    if not source.is_dir():
        return None
    try:
        folder = Path(tempfile.mkdtemp(prefix="gpuwatch-rescued-"))
        for path in source.iterdir():
            shutil.move(path, folder / path.name)
    except OSError:
        return None
    return folder


def remove_stale() -> None:
    """Remove folders of this user whose launch is gone (it and its agent were killed), as far as can be told here."""
    for base in {_SHARED_MEMORY, Path(tempfile.gettempdir())}:
        for folder in base.glob(f"{_PREFIX}{os.getuid()}-*"):
            try:
                if not _is_ours(folder):
                    continue
                pid_text, created_text, namespace = _read_owner(folder / _OWNER).split()
                pid, created = int(pid_text), float(created_text)
                if int(namespace) != _pid_namespace():
                    continue
            except (OSError, ValueError):
                continue
            try:
                alive = abs(psutil.Process(pid).create_time() - created) < 1
            except psutil.Error:
                alive = False
            if not alive:
                remove_scratch(folder)


def _is_ours(folder: Path) -> bool:
    """A folder itself, no link to one, of this user: anybody may put anything into the machine's temporary folders."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _read_owner(path: Path) -> str:
    """Never follows a link and never waits, as a FIFO would have us do."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no file")
        return os.read(fd, 200).decode("ascii", "replace")
    finally:
        os.close(fd)


def adopt_scratch(folder: Path) -> None:
    """This process answers for the folder from now on: its launch was killed."""
    try:
        _sign(folder)
    except OSError:
        pass
