"""What kind of file system a file is on: memory (tmpfs) can be registered with the GPU's driver, a disk not always."""

from __future__ import annotations

import re
from pathlib import Path


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The name of its kind, as `mount -t` has it; "an unknown file system" where that is not told.

    A line of `mounts`: `tmpfs /dev/shm tmpfs rw,nosuid 0 0`, with a space in a path as `\\040`.
    """
    try:
        path = path.resolve()
        found = "an unknown file system"
        longest = -1
        for line in mounts.read_text(errors="replace").splitlines():
            fields = line.split(" ")
            place = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1]))
            if (path == place or place in path.parents) and len(place.parts) >= longest:  # the last is on top
                longest, found = len(place.parts), fields[2]
        return found
    except (OSError, IndexError):
        return "an unknown file system"
