"""What a rank's own process takes. (man 5 proc)"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ....core.recorder.lone_process import rank_name
from .values import Values

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def read_ranks(pids: Iterable[tuple[int, int]], root: Path = Path("/")) -> Values:
    """By `rank 3`: memory, processor and open files. `pids` are (rank, pid); one that has ended is left out."""
    found: Values = {}
    for rank, pid in pids:
        folder, name = root / "proc" / str(pid), rank_name(rank)
        with suppress(OSError, ValueError, IndexError):
            found[name, "rss"] = int((folder / "statm").read_text().split()[1]) * _PAGE
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            found[name, "rank_cpu"] = (int(fields[11]) + int(fields[12])) / _TICKS
        with suppress(OSError, ValueError, IndexError):  # another user's
            open_files = sum(1 for _ in (folder / "fd").iterdir())
            found[name, "open_files"] = open_files
            limits = (folder / "limits").read_text().splitlines()
            limit = next(line.split()[3] for line in limits if line.startswith("Max open files"))
            found[name, "open_files_limit"] = int(limit)
    return found
