"""Writes a frame, wherever its tensors lie, and asks the judge about it if there may be something to say."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.frames import Phase
from ...core.recorder.layout import NOTHING
from ...core.recorder.writer import OpenPage
from .collectives import issued
from .judging import Judging
from .progress import Progress
from .roots import ModuleInfo
from .rows import Row


class Frames:
    """All frames that Python writes; the native writer writes the ordinary ones."""

    def __init__(self, progress: Progress, judging: Judging) -> None:
        self._recorder = progress.recorder
        self._judging = judging

    def put(
        self,
        page: OpenPage,
        info: ModuleInfo,
        phase: Phase,
        rows: Sequence[Row],
        *,
        parent: int = NOTHING,
        depth: int = 0,
        entered: int = -1,
    ) -> int:
        """Write a frame into `page`, which is open; returns its index there.

        `entered` is the number of collectives that had been issued when the call began, -1 if that is not known.
        """
        seq = issued()
        collectives = max(0, seq - entered) if entered >= 0 else 0
        packed = [row.packed for row in rows]
        index = self._recorder.frame(info.id, parent, depth, phase, seq, packed, collectives)
        if any(row.notable for row in rows) or self._judging.suspects(page):
            self._judging.look(page, index)
        return index
