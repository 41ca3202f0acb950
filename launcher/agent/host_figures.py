"""The host's own figures, as Linux shows them. What cannot be read is left out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ...core.host import stat_fields
from ...core.identity import rank_name
from ...core.wire.columns import HOST
from .memory_group import MemoryGroup, words_of

Values = dict[tuple[str, str], float]
"""(what it is of, a key of METRICS) -> the figure; a count as it stands."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_KIB = 1024


def read_host(root: Path = Path("/")) -> Values:
    """Processors, memory, swap and network of the host."""
    found: Values = {}
    for part in (_processors, _memory, _swapping, _network):
        with suppress(OSError, ValueError, IndexError, KeyError, ZeroDivisionError):
            found.update({(HOST, what): value for what, value in part(root)})
    return found


def _processors(root: Path) -> Iterator[tuple[str, float]]:
    """/proc/stat: seconds, of all processors together divided by their number. (man 5 proc)"""
    with (root / "proc/stat").open() as file:
        first = file.readline().split()
        number = 0
        for line in file:
            if not line.startswith("cpu"):
                break
            number += 1
    ticks = [int(word) for word in first[1:9]]
    user, nice, system, _, iowait, irq, softirq, steal = ticks
    per_second = 1 / (_TICKS * number)
    yield "cpu", (user + nice + system + irq + softirq) * per_second
    yield "iowait", iowait * per_second
    yield "steal", steal * per_second


def _memory(root: Path) -> Iterator[tuple[str, float]]:
    words = words_of(root / "proc/meminfo", ":")
    kib = {name: int(words[name].split()[0]) for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")}
    yield "memory_used", (kib["MemTotal"] - kib["MemAvailable"]) * _KIB
    yield "memory_total", kib["MemTotal"] * _KIB
    yield "swap_used", (kib["SwapTotal"] - kib["SwapFree"]) * _KIB


def _swapping(root: Path) -> Iterator[tuple[str, float]]:
    words = words_of(root / "proc/vmstat")
    yield "swap_in", int(words["pswpin"]) * _PAGE
    yield "swap_out", int(words["pswpout"]) * _PAGE


def _network(root: Path) -> Iterator[tuple[str, float]]:
    """/proc/net/dev of all interfaces that are devices; of all but the loopback where none is, as in a container."""
    numbers = {}
    for line in (root / "proc/net/dev").read_text().splitlines()[2:]:
        name, _, rest = line.partition(":")
        numbers[name.strip()] = [int(word) for word in rest.split()]
    numbers.pop("lo", None)
    devices = [name for name in numbers if (root / "sys/class/net" / name / "device").exists()] or list(numbers)
    if devices:
        yield "net_received", sum(numbers[name][0] for name in devices)
        yield "net_sent", sum(numbers[name][8] for name in devices)
        yield "net_errors", sum(numbers[name][2] + numbers[name][10] for name in devices)


def read_disks(folders: dict[str, Path]) -> Values:
    """Room on the disks of these folders. A file system may never answer."""
    found: Values = {}
    for name, folder in folders.items():
        with suppress(OSError):
            disk = shutil.disk_usage(folder)
            found[name, "disk_free"], found[name, "disk_size"] = disk.free, disk.total
    return found


# What the job's own limits leave it: of its memory and its processors. (docs.kernel.org/admin-guide/cgroup-v2.html)


def read_cgroup(root: Path = Path("/")) -> Values:
    """Figures of this process's cgroup, or of the one above it that has the limit. {} where there is none."""
    found: Values = {}
    with suppress(OSError):
        membership = (root / "proc/self/cgroup").read_text()
        for part in (_group_memory, _group_processors):
            with suppress(OSError, ValueError, KeyError, IndexError):
                found.update({(HOST, what): value for what, value in part(root / "sys/fs/cgroup", membership)})
    return found


def _group_memory(cgroups: Path, membership: str) -> Iterator[tuple[str, float]]:
    group = MemoryGroup.of(membership, cgroups)
    limited = group.limit() if group is not None else None
    if group is not None and limited is not None:
        limit, folder = limited
        yield "job_memory_used", group.used(folder)
        yield "job_memory_limit", limit


def _group_processors(cgroups: Path, membership: str) -> Iterator[tuple[str, float]]:
    """Periods in which it was held back, in seconds. Of version 2, the innermost one with a limit."""
    inside = next((Path(line[3:].strip().lstrip("/")) for line in membership.splitlines() if line[:3] == "0::"), None)
    if inside is None or ".." in inside.parts:  # moved out of the container's own cgroup
        return
    for folder in (cgroups / place for place in (inside, *inside.parents)):
        with suppress(OSError, ValueError):
            limit, period_us = (folder / "cpu.max").read_text().split()
            if limit != "max":
                yield "job_cpu_held", int(words_of(folder / "cpu.stat")["nr_throttled"]) * int(period_us) / 1e6
                return


# The counters of the host's InfiniBand ports. (docs.kernel.org/infiniband/sysfs.html)

_WORD = 4
"""port_rcv_data and port_xmit_data count words of four bytes."""
_ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)


def read_infiniband(root: Path = Path("/")) -> Values:
    """By `mlx5_0/1`: bytes in each direction, and all errors together."""
    found: Values = {}
    for folder in (root / "sys/class/infiniband").glob("*/ports/*/counters"):
        name = f"{folder.parent.parent.parent.name}/{folder.parent.name}"
        for what, counters, size in (
            ("ib_received", ("port_rcv_data",), _WORD),
            ("ib_sent", ("port_xmit_data",), _WORD),
            ("ib_errors", _ERRORS, 1),
        ):
            for counter in counters:
                with suppress(OSError, ValueError):
                    found[name, what] = found.get((name, what), 0) + size * int((folder / counter).read_text())
    return found


# What a rank's own process takes. (man 5 proc)


def read_ranks(pids: Iterable[tuple[int, int]], root: Path = Path("/")) -> Values:
    """By `rank 3`: memory, processor and open files. `pids` are (rank, pid); one that has ended is left out."""
    found: Values = {}
    for rank, pid in pids:
        folder, name = root / "proc" / str(pid), rank_name(rank)
        with suppress(OSError, ValueError, IndexError):
            found[name, "rss"] = int((folder / "statm").read_text().split()[1]) * _PAGE
            fields = stat_fields(folder)
            found[name, "rank_cpu"] = (int(fields[11]) + int(fields[12])) / _TICKS
        with suppress(OSError, ValueError, IndexError):  # another user's
            found[name, "open_files"] = sum(1 for _ in (folder / "fd").iterdir())
            limits = (folder / "limits").read_text().splitlines()
            limit = next((line.split()[3] for line in limits if line.startswith("Max open files")), "")
            found[name, "open_files_limit"] = int(limit)
    return found
