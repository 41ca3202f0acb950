"""Writes the frames that the part in C does not write. It and worker/native/frame_store.c are the two that write any.

The part that records a frame chooses its rows: module calls (hooks/call_frames.py), compiled graphs, backwards, steps,
buffers, a tensor that the script names. A FrameReader reads the numbers of each row: rows.py those in host memory and
on a device, compile/ those of a graph. This file puts them together, and core/recorder/writer.py packs the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...core.frames import FramePhase
from ...core.recorder.layout import NOTHING
from ...core.recorder.writer import OpenPage, RowTuple
from .collectives import issued
from .judging import AlarmRecorder
from .progress import RunProgress
from .recorded_row import RecordedRow
from .roots import ModuleInfo, RankRoots
from .rows import RowWriter


class FrameReader(Protocol):
    """What reads the arguments and results of a call: a RowWriter, or the compiled regions that ran in the call."""

    def argument(self, info: ModuleInfo, role: str, leaf: Any) -> RecordedRow:
        """The row of an argument. It is never notable: a call is judged by its output."""

    def leaf(self, info: ModuleInfo, role: str, leaf: Any) -> RecordedRow:
        """The row of a result."""


@dataclass(eq=False, repr=False)
class FrameWriter:
    """Writes frames, and has notable ones judged. Hooks that write frames take from here what they make them of."""

    progress: RunProgress
    roots: RankRoots
    rows: RowWriter
    judging: AlarmRecorder

    def put(
        self,
        page: OpenPage,
        info: ModuleInfo,
        phase: FramePhase,
        rows: Sequence[RecordedRow],
        *,
        parent: int = NOTHING,
        depth: int = 0,
        entered: int = -1,
    ) -> int:
        """Write a frame into `page`, which is open. Returns the frame's index in the page.

        `entered` is the number of collectives issued before the call began, -1 if it is not known.
        """
        seq = issued()
        collectives = max(0, seq - entered) if entered >= 0 else 0
        index = self.put_unjudged(info.id, phase, seq, [row.packed for row in rows], parent, depth, collectives)
        if any(row.notable for row in rows) or self.judging.suspects(page):
            self.judging.judge(page, index)
        return index

    def put_unjudged(
        self,
        module: int,
        phase: FramePhase,
        seq: int,
        packed: Sequence[RowTuple],
        parent: int = NOTHING,
        depth: int = 0,
        collectives: int = 0,
    ) -> int:
        """Write a frame into the current page that is judged by others, or not at all. Returns its index in the page.

        `module`, `parent`: ids of modules. `seq`: see `issued`.
        """
        return self.progress.recorder.frame(module, parent, depth, phase.number, seq, packed, collectives)
