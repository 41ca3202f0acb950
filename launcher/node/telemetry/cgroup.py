"""What the job's own limits leave it: of its memory and its processors. (docs.kernel.org/admin-guide/cgroup-v2.html)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ....core.telemetry.metrics import HOST
from .values import Values


def read_cgroup(root: Path = Path("/")) -> Values:
    """Of the cgroup that this process is in, or the one above it that has the limit. {} where there is none."""
    found: Values = {}
    with suppress(OSError):
        membership = (root / "proc/self/cgroup").read_text()
        inside = next((line[3:].strip() for line in membership.splitlines() if line.startswith("0::")), None)
        if inside is None:
            return found
        for part in (_memory, _processors):
            with suppress(OSError, ValueError, KeyError, IndexError):
                found.update({(HOST, what): value for what, value in part(root / "sys/fs/cgroup", inside)})
    return found


def _memory(cgroups: Path, inside: str) -> Iterator[tuple[str, float]]:
    """Without the pages of files, which the kernel takes back when it must."""
    limits = [(int(word), folder) for folder, word in _limited(cgroups, inside, "memory.max")]
    if limits:
        limit, folder = min(limits)
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        files = int(stat["active_file"]) + int(stat["inactive_file"])
        yield "job_memory_used", max(0, int((folder / "memory.current").read_text()) - files)
        yield "job_memory_limit", limit


def _processors(cgroups: Path, inside: str) -> Iterator[tuple[str, float]]:
    """Periods in which it was held back, in seconds."""
    for folder, _ in _limited(cgroups, inside, "cpu.max"):
        stat = dict(line.split(" ", 1) for line in (folder / "cpu.stat").read_text().splitlines())
        period_us = int((folder / "cpu.max").read_text().split()[1])
        yield "job_cpu_held", int(stat["nr_throttled"]) * period_us / 1e6
        return


def _limited(cgroups: Path, inside: str, name: str) -> Iterator[tuple[Path, str]]:
    """(folder, limit) of the cgroup and of those above it that have one."""
    path = Path(inside.lstrip("/"))
    if ".." in path.parts:  # of a process that was moved out of the container's own cgroup
        return
    for place in (path, *path.parents):
        with suppress(OSError, IndexError):
            word = (cgroups / place / name).read_text().split()[0]
            if word != "max":
                yield cgroups / place, word
