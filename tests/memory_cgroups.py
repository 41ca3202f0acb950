"""Memory cgroups with a limit, in which the kernel ends processes of a test: for root."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

_ENTER = 'echo $$ > "$0" && exec "$@"'
_SHOW_FIRST = "mount -t tmpfs none $0 && mkdir $0/memory && mount -t cgroup -o memory none $0/memory"
_SHOW_SECOND = "mount -t cgroup2 none $0"
_TOP = Path("/sys/fs/cgroup")


class JobCgroup:
    """A memory cgroup with a limit, and one below it for each part of a job: in version 2 it has no process itself."""

    def __init__(self, base: Path, limit: int, parts: tuple[str, ...]) -> None:
        """`limit` in bytes."""
        self.is_first = base.name == "memory"
        self.folder = base / f"gpuwatch-test-{os.getpid()}-{secrets.token_hex(2)}"
        self.parts = [self.folder / name for name in parts]
        self._limit = limit

    def make(self, held: ExitStack) -> None:
        """Raises OSError."""
        for folder in (self.folder, *self.parts):
            if folder == self.parts[0] and not self.is_first:
                (self.folder / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
            held.callback(folder.rmdir)
        file = self.folder / ("memory.limit_in_bytes" if self.is_first else "memory.max")
        file.write_text(str(self._limit))

    def inside(self, *command: str) -> list[str]:
        """The command, in the first part."""
        return ["sh", "-c", _ENTER, str(self.parts[0] / "cgroup.procs"), *command]

    def shown(self, *command: str) -> list[str]:
        """The command in a mount namespace whose /sys has no cgroups, as `ip netns exec` makes it: with them."""
        show = _SHOW_FIRST if self.is_first else _SHOW_SECOND
        return ["sh", "-c", f'{show} && exec "$@"', str(_TOP), *command]


@contextmanager
def job_cgroup(limit: int, parts: tuple[str, ...] = ("launch",)) -> Iterator[JobCgroup]:
    """Raises OSError where there can be none."""
    made = JobCgroup(_TOP / "memory" if (_TOP / "memory").is_dir() else _TOP, limit, parts)
    with ExitStack() as held:
        made.make(held)
        yield made


def why_no_cgroup() -> str:
    """Why no process can run out of memory in a cgroup here; "" if one can."""
    if psutil.swap_memory().total:
        return "the machine swaps: it would not run out of memory"
    try:
        with job_cgroup(1 << 30):
            return ""
    except OSError as error:
        return f"cannot make a memory cgroup: {error}"
