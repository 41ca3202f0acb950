"""The collector's own log: its stderr, which is a file in the run's folder."""

from __future__ import annotations

from ..core.tell import tell


def log(line: str) -> None:
    """A line, if the disk takes it."""
    tell(line)
