"""The host's own figures, as Linux shows them. What cannot be read is left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ....core.telemetry.metrics import HOST
from .values import Values

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
    words = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    kib = {name: int(words[name].split()[0]) for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")}
    yield "memory_used", (kib["MemTotal"] - kib["MemAvailable"]) * _KIB
    yield "memory_total", kib["MemTotal"] * _KIB
    yield "swap_used", (kib["SwapTotal"] - kib["SwapFree"]) * _KIB


def _swapping(root: Path) -> Iterator[tuple[str, float]]:
    for line in (root / "proc/vmstat").read_text().splitlines():
        name, _, number = line.partition(" ")
        if name in ("pswpin", "pswpout"):
            yield {"pswpin": "swap_in", "pswpout": "swap_out"}[name], int(number) * _PAGE


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
            disk = os.statvfs(folder)
            found[name, "disk_free"] = disk.f_bavail * disk.f_frsize
            found[name, "disk_size"] = disk.f_blocks * disk.f_frsize
    return found
