"""The type of the file system that a file is on. A GPU driver can register tmpfs memory, but not every disk file."""

from __future__ import annotations

import re
from pathlib import Path


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type as `mount -t` names it; "an unknown file system" if it cannot be found.

    A line of `mounts`: `tmpfs /dev/shm tmpfs rw,nosuid 0 0`, with a space in a path as `\\040`.
    """
    try:
        path = path.resolve()
        found = "an unknown file system"
        longest = -1
        for line in mounts.read_text(errors="replace").splitlines():
            fields = line.split(" ")
            place = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1]))
            if (path == place or place in path.parents) and len(place.parts) >= longest:  # the last one is on top
                longest, found = len(place.parts), fields[2]
        return found
    except (OSError, IndexError):
        return "an unknown file system"
