"""How many processes of this job the kernel has ended for lack of memory, as its memory cgroup counts them."""

from __future__ import annotations

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def memory_kills(membership: str | None = None, root: Path = CGROUPS) -> int | None:
    """The counter of this process's cgroup, version 2 or 1; None if it cannot be read.

    `membership` is what /proc/self/cgroup says. (docs.kernel.org/admin-guide/cgroup-v2.html, memory.events)
    """
    try:
        text = Path("/proc/self/cgroup").read_text() if membership is None else membership
    except OSError:
        return None
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inside = path.lstrip("/")
        if "memory" in controllers.split(","):
            found = _counter(root / "memory" / inside / "memory.oom_control")
        elif not controllers:
            found = _counter(root / inside / "memory.events")
        else:
            continue
        if found is not None:
            return found
    return None


def _counter(file: Path) -> int | None:
    try:
        words = dict(line.split(" ", 1) for line in file.read_text().splitlines() if " " in line)
        return int(words["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
