"""The collector's own log: its stderr, which is a file in the run's folder."""

from __future__ import annotations

import sys
from contextlib import suppress


def log(line: str) -> None:
    """A line, if the disk takes it."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
