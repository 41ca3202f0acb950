"""The type of the file system that a file is on. A GPU driver can register tmpfs memory, but not every disk file."""

from __future__ import annotations

from pathlib import Path

import psutil


def file_system_of(path: Path) -> str:
    """The type as `mount -t` names it; "an unknown file system" if it cannot be found."""
    try:
        path = path.resolve()
        mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
        return str(max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype)  # the last one is on top
    except (OSError, ValueError):
        return "an unknown file system"
