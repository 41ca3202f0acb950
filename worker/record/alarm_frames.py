"""Writes a frame, on whatever device its tensors are, and has notable frames judged."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.frames import Phase
from ...core.recorder.layout import NOTHING
from ...core.recorder.writer import OpenPage
from .collectives import issued
from .judging import AlarmRecorder
from .progress import RunProgress
from .roots import ModuleInfo
from .rows import RecordedRow


class FrameWriter:
    """Writes the frames that the native writer does not write."""

    def __init__(self, progress: RunProgress, judging: AlarmRecorder) -> None:
        self._recorder = progress.recorder
        self._judging = judging

    def put(
        self,
        page: OpenPage,
        info: ModuleInfo,
        phase: Phase,
        rows: Sequence[RecordedRow],
        *,
        parent: int = NOTHING,
        depth: int = 0,
        entered: int = -1,
    ) -> int:
        """Write a frame into the open page `page`. Returns the frame's index in the page.

        `entered` is the number of collectives issued before the call began, -1 if it is not known.
        """
        seq = issued()
        collectives = max(0, seq - entered) if entered >= 0 else 0
        packed = [row.packed for row in rows]
        index = self._recorder.frame(info.id, parent, depth, phase, seq, packed, collectives)
        if any(row.notable for row in rows) or self._judging.suspects(page):
            self._judging.judge(page, index)
        return index
