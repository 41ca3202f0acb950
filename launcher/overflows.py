"""What the ranks of this node say themselves of an overflow: the launch's own evidence, whatever becomes of its agent,
its collector and its disk."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from shlex import quote

from ..core.exits import RANK_OVERFLOW
from ..core.frames import module_text
from ..core.recorder.layout import file_name
from ..core.recorder.reader import NotReady, RecorderReader
from ..core.records import Anomaly
from ..core.text.ranks_text import ranks_text
from ..core.text.shown import shown_name
from ..core.wire.pipe import Verdict


class Overflows:
    """By (attempt, rank): the first anomaly, or None where a rank says no more than that there was one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[tuple[int, int], Anomaly | None] = {}

    def look(self, attempt: int, codes: dict[int, int | None]) -> None:
        """The ranks of this attempt have ended with these codes: look into their recorders."""
        for rank, code in codes.items():
            seen, first = _first_of(self._folder / file_name(rank, attempt))
            if seen or (seen is None and code == RANK_OVERFLOW):  # a script may have that code of its own
                self._seen[attempt, rank] = first

    @property
    def sentence(self) -> str:
        """Who saw one, and the one of the earliest batch; "" where there is none. Which was first, it cannot tell."""
        if not self._seen:
            return ""
        attempt = min(number for number, _ in self._seen)
        ranks = [rank for number, rank in self._seen if number == attempt]
        known = [found for (number, _), found in self._seen.items() if number == attempt and found is not None]
        if not known:
            return f"{ranks_text(ranks)} saw an overflow, and where is unknown"
        first = min(known, key=lambda anomaly: (anomaly.where.batch, anomaly.where.collectives, anomaly.where.rank))
        module = module_text(first.module, first.cls)
        place = f"{first.value} in {shown_name(first.role)} of {module}, {first.phase} of batch {first.where.batch}"
        if len(ranks) == 1:
            return f"{ranks_text(ranks)} saw an overflow: {place}"
        return f"{ranks_text(ranks)} saw an overflow; of the earliest batch, on rank {first.where.rank}: {place}"


def where_it_is(verdict: Verdict | None) -> str:
    """What has an overflow that the verdict knows nothing of."""
    if verdict is not None and verdict.overflow_in:
        return f"no report has it yet; make one of this node's spool with: gpuwatch report {quote(verdict.overflow_in)}"
    return "no report has it: its event was lost on the way"


def _first_of(recorder: Path) -> tuple[bool | None, Anomaly | None]:
    """Whether a rank says that it saw an overflow, None without a recorder; and the first one, as far as it is read."""
    with suppress(OSError, NotReady), closing(RecorderReader(recorder)) as reader:
        return reader.overflow_seen, reader.first_anomaly()
    return None, None
