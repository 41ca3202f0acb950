"""Where in a step a rank stands that is in no module: what its recorder says ended last in the batch. No process.

The head of a recorder says `script` after a forward and after an optimizer's step, and `backward` from the first
gradient until something else begins.
"""

from __future__ import annotations

import numpy

from ...core.events.rank_standing import EndedPart
from ...core.frames import FramePhase, RowMark
from ...core.recorder.layout import HeadField, RankPhase
from ...core.recorder.page_tables import PageTables
from ...core.recorder.reader import RecorderReader

_OF_BACKWARD = [FramePhase.LOSS.number, FramePhase.BACKWARD.number, FramePhase.RECOMPUTE.number]
_LOOKED_AT = 8
"""Earlier pages in which a backward is looked for: where none is recorded, its absence says nothing."""


def ended_part(reader: RecorderReader, batch: int) -> EndedPart:
    """The part of its last batch that ended last, for a rank whose script is in no forward, backward or step.

    "" where the recorder does not show it, as in a batch that `--every` skips, or if `batch` is the last one no more.
    """
    if batch < 0 or reader[HeadField.BATCH] != batch:
        return ""
    phase, number, step = (reader[field] for field in (HeadField.PHASE, HeadField.PAGE, HeadField.STEP))
    if phase == RankPhase.BACKWARD:
        return "backward"
    page = reader.page(number) if phase == RankPhase.SCRIPT else None
    if page is None:
        return ""
    tables = PageTables(page)
    if step > page.step:
        # a step right after a forward is that of the batch before: of one that is pipelined, or of another model
        return "optimizer" if _shows_backward(tables) else ""
    skipped = bool((tables.rows["mark"] & RowMark.SKIPPED).any())
    if skipped or _shows_backward(tables) or not _backwards_are_recorded(reader, number):
        return ""
    return "forward"


def _shows_backward(tables: PageTables) -> bool:
    return bool(numpy.isin(tables.frames["phase"], _OF_BACKWARD).any())


def _backwards_are_recorded(reader: RecorderReader, number: int) -> bool:
    earlier = [held.number for held in reader.held() if held.number < number]
    pages = (reader.page(one) for one in reversed(earlier[-_LOOKED_AT:]))
    return any(_shows_backward(PageTables(page)) for page in pages if page is not None)
