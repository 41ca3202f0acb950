"""The counters of the host's InfiniBand ports. (docs.kernel.org/infiniband/sysfs.html)"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from .values import Values

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
            counts = [count for counter in counters if (count := _count(folder / counter)) is not None]
            if counts:
                found[name, what] = size * sum(counts)
    return found


def _count(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
