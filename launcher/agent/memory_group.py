"""The memory cgroup of a process, version 2 or 1: its limit, what it used, and how many the kernel ended in it.

docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")


class _FileNames(NamedTuple):
    """What the files of one version are called."""

    kills: str
    """It has a line `oom_kill 2`."""
    limit: str
    used: str
    peak: str
    cached: tuple[str, str]
    """Lines of memory.stat: pages of files, which the kernel takes back when it must."""


_VERSION_2 = _FileNames(
    "memory.events", "memory.max", "memory.current", "memory.peak", ("active_file", "inactive_file")
)
_VERSION_1 = _FileNames(
    "memory.oom_control",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_NO_LIMIT = 1 << 62
"""Version 1 has a number of about 2**63 bytes where there is no limit, version 2 `max`."""


class MemoryGroup(NamedTuple):
    """The folder of a cgroup, below that of its hierarchy."""

    folder: Path
    top: Path
    names: _FileNames

    @classmethod
    def of(cls, membership: str, root: Path = CGROUPS) -> MemoryGroup | None:
        """The one of a process, of which `membership` is the file /proc/PID/cgroup; None where that does not tell."""
        for line in membership.splitlines():
            controllers, _, path = line.partition(":")[2].partition(":")
            if not controllers and line.startswith("0::"):
                top, names = root, _VERSION_2
            elif "memory" in controllers.split(","):
                top, names = root / "memory", _VERSION_1
            else:
                continue
            inside = Path(path.strip().lstrip("/"))
            if ".." in inside.parts:  # outside of this container's cgroups
                continue
            # a container may see the path that its host has, and its own cgroup alone
            folder = top / inside if (top / inside).is_dir() else top
            if (folder / names.kills).exists() or (folder / names.limit).exists():
                return cls(folder, top, names)
        return None

    def kills(self) -> int | None:
        """How many of its processes the kernel has ended for lack of memory, since it was made; None if unknown."""
        with suppress(OSError, KeyError, ValueError):
            return int(words_of(self.folder / self.names.kills)["oom_kill"])
        return None

    def limit(self) -> tuple[int, Path] | None:
        """(bytes, folder): the smallest limit of this cgroup and of those above it, and whose it is."""
        return min(self._limits(), default=None)

    def _limits(self) -> Iterator[tuple[int, Path]]:
        for folder in (self.folder, *self.folder.parents):
            if folder.is_relative_to(self.top):
                with suppress(OSError, ValueError):
                    limit = int((folder / self.names.limit).read_text())
                    if limit < _NO_LIMIT:
                        yield limit, folder

    def used(self, folder: Path) -> int:
        """Bytes without the pages of files. Raises OSError, KeyError or ValueError."""
        stat = words_of(folder / "memory.stat")
        files = sum(int(stat[name]) for name in self.names.cached)
        return max(0, int((folder / self.names.used).read_text()) - files)

    def peak(self, folder: Path) -> int:
        """The most bytes that it has ever used; 0 if unknown (Linux before 5.19, version 2)."""
        with suppress(OSError, ValueError):
            return int((folder / self.names.peak).read_text())
        return 0


def words_of(file: Path, after: str = " ") -> dict[str, str]:
    """A file of lines such as `oom_kill 2`. Raises OSError."""
    return dict(line.split(after, 1) for line in file.read_text().splitlines() if after in line)


class MemoryLack(NamedTuple):
    """What the kernel did in a rank's cgroup since the rank began."""

    kills: int = 0
    """How many processes it has ended for lack of memory,"""
    limit: int = 0
    """in bytes: 0 if there is none,"""
    peak: int = 0
    """and the most that the cgroup with that limit has used; 0: unknown."""


class MemoryWatch:
    """The cgroups of a node's ranks. A rank's is read while it lives: nothing tells of it once it has ended."""

    def __init__(self, proc: Path = Path("/proc"), root: Path = CGROUPS) -> None:
        self._proc = proc
        self._root = root
        self._begun: dict[tuple[int, int], tuple[MemoryGroup, int]] = {}

    def watch(self, key: tuple[int, int], pid: int) -> None:
        """From now on: what the kernel has done before counts for earlier ranks."""
        with suppress(OSError):
            group = MemoryGroup.of((self._proc / str(pid) / "cgroup").read_text(), self._root)
            kills = group.kills() if group is not None else None
            if group is not None and kills is not None:
                self._begun[key] = group, kills

    def lack_of(self, key: tuple[int, int]) -> MemoryLack:
        """A rank has ended."""
        group, before = self._begun.pop(key, (None, 0))
        after = group.kills() if group is not None else None
        if group is None or after is None or after <= before:
            return MemoryLack()
        limit, folder = group.limit() or (0, None)
        return MemoryLack(after - before, limit, group.peak(folder) if folder is not None else 0)
