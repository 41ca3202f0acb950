"""What the ranks of this node say themselves of an overflow: the launch's own evidence, whatever becomes of its agent,
its collector and its disk."""

from __future__ import annotations

from pathlib import Path

from ..core.exits import RANK_OVERFLOW
from ..core.plain import plain_fields
from ..core.recorder.layout import file_name
from ..core.recorder.reader import NotReady, RecorderReader
from ..core.records import Anomaly


class Overflows:
    """By (attempt, rank): the first anomaly, or None where a rank says no more than that there was one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[tuple[int, int], Anomaly | None] = {}

    def look(self, attempt: int, codes: dict[int, int | None]) -> None:
        """The ranks of this attempt have ended with these codes: look into their recorders."""
        for rank, code in codes.items():
            try:
                reader = RecorderReader(self._folder / file_name(rank, attempt))
            except (OSError, NotReady):
                if code == RANK_OVERFLOW:
                    self._seen[attempt, rank] = None
                continue
            if reader.overflow_seen or code == RANK_OVERFLOW:
                self._seen[attempt, rank] = plain_fields(reader.first_anomaly())
            reader.close()

    @property
    def sentence(self) -> str:
        """The first of them; "" where there is none."""
        for (_, rank), anomaly in sorted(self._seen.items(), key=lambda entry: entry[0]):
            if anomaly is None:
                return f"rank {rank} saw an overflow, and where is unknown"
            module = f"`{anomaly.module}` ({anomaly.cls})" if anomaly.module else f"`{anomaly.cls}`"
            place = f"{anomaly.role} of {module}, {anomaly.phase} of batch {anomaly.where.batch}"
            return f"rank {rank} saw an overflow: {anomaly.value} in {place}"
        return ""
