"""When a weight was last read and finite, and whether an optimizer step can have changed it since. Pure.

A weight is read in each forward, and after each step of an optimizer that holds it. A weight that was finite after
the last step and is bad in the next forward was changed by something else: the script, a load, or memory. A weight
that no row shows after a step that has run since leaves open which of them it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ...core.frames import Frame, FramePhase, Page, Row, RowKind
from ...core.roles import RoleKind
from ..report.sentence_parts import counted
from .diagnosis import number_text

UNSEEN = "no optimizer step was seen in between: the script, a load or memory changed it"


class WeightReading(NamedTuple):
    """One reading of a weight."""

    page: Page
    frame: Frame
    row: Row

    @property
    def after_step(self) -> bool:
        """It was read after a step of an optimizer that holds it; else in a forward."""
        return self.frame.phase == FramePhase.OPTIMIZER


class WeightHistory(NamedTuple):
    """The earlier readings of a bad weight."""

    changed: bool = False
    """Something else than a step has changed it since it was finite."""
    text: str = ""
    """A clause for the sentence of a verdict; "" if nothing is known."""
    note: str = ""
    """A line of evidence; "" if there is no finite reading."""


def readings_of(page: Page, frame: Frame, row: Row, earlier: Sequence[Page]) -> Iterator[WeightReading]:
    """The readings of a weight from before `frame` of `page`, the latest first. `earlier` are pages, latest first.

    One of another shape is left out: a shard is not the whole weight.
    """
    for each in (page, *earlier):
        for other in sorted(each.frames, key=lambda found: -found.index):
            if other.module != frame.module or (each is page and other.index >= frame.index):
                continue
            if other.phase not in (FramePhase.FORWARD, FramePhase.OPTIMIZER):
                continue
            for found in other.weights:
                if found.role == row.role and found.kind == RowKind.MEASURED and found.shape == row.shape:
                    yield WeightReading(each, other, found)


def history_of(page: Page, frame: Frame, row: Row, earlier: Sequence[Page]) -> WeightHistory:
    """Earlier readings of a weight that is bad in a forward of `page`; `earlier` pages of its root are latest first."""
    last = next(readings_of(page, frame, row, earlier), None)
    if last is None or not last.row.finite:
        return WeightHistory()
    since = [each for each in earlier if each.number > last.page.number]
    steps = page.step - last.page.step - (1 if last.after_step else 0)
    batch = last.page.batch
    text = ""
    if last.page is page or steps <= 0:
        when = f"after step {page.step}" if last.after_step else f"in batch {batch}"
        when = "earlier in that batch" if last.page is page else when
        text = f"{when}, and no optimizer step was seen in between"
    elif _is_whole([page, *since, last.page]):
        if last.after_step:
            text = f"after the step of batch {batch}, and no later step on it was seen"
        elif _stepped_without_it([*since, last.page], frame, row):
            text = f"in batch {batch}, had no gradient since, and no step on it was seen"
    when = "after the step of" if last.after_step else "in the forward of"
    note = f"{row.role} was finite when it was last read, {when} batch {batch}: abs max {number_text(last.row.abs_max)}"
    if text:
        collective = ", a collective" if frame.seq > last.frame.seq >= 0 else ""
        return WeightHistory(True, f"it was finite {text}: the script, a load{collective} or memory changed it", note)
    ran = f"{counted(steps, 'optimizer step')} ran in between, and it was not read after that"
    text = f"it was finite in batch {batch}; {ran}: whether a step or something else changed it is unknown"
    return WeightHistory(False, text, note)


def _is_whole(pages: list[Page]) -> bool:
    batches = [each.batch for each in pages]
    gaps = any(later - before != 1 for later, before in pairwise(batches))
    return not gaps and not any(each.lost_frames for each in pages)


def _stepped_without_it(pages: list[Page], frame: Frame, row: Row) -> bool:
    """Whether other weights had gradients and were read after a step: so would this one, had an optimizer held it."""
    frames = [other for page in pages for other in page.frames]
    seen = {
        (other.module, found.parsed_role.name)
        for other in frames
        for found in other.gradients
        if found.role_kind is RoleKind.GRAD_WEIGHT and found.kind == RowKind.MEASURED
    }
    stepped = any(other.phase == FramePhase.OPTIMIZER and other.weights for other in frames)
    return stepped and bool(seen) and (frame.module, row.parsed_role.name) not in seen
