"""When a weight was last read and finite, and whether an optimizer step can have changed it since. Pure.

A weight is read in each forward, and after each step of an optimizer that holds it. A weight that was finite after the
last step and is bad in the next forward was changed by something else: the script, a load, or memory. A weight that no
row shows after a step that has run since leaves open which of them it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ...core.frames import Frame, FramePhase, Page, Row, RowContent, format_number
from ...core.roles import RoleKind

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


@dataclass(frozen=True)
class WeightHistory:
    """What is known of a bad weight from before."""

    finite: WeightReading | None
    """Its last reading, if that was finite; None if there is none that is known, or that was bad as well."""
    stepped: bool | None
    """Whether a step can have changed it since; None if that is not known."""
    text: str
    """A clause for the sentence of a verdict; "" if nothing is known."""

    @property
    def note(self) -> str:
        """A line of evidence; "" if there is no finite reading."""
        if self.finite is None:
            return ""
        page, _, row = self.finite
        when = "after the step of" if self.finite.after_step else "in the forward of"
        largest = format_number(row.abs_max).strip()
        return f"{row.role} was finite when it was last read, {when} batch {page.batch}: abs max {largest}"


def readings(page: Page, frame: Frame, row: Row, earlier: Sequence[Page] = ()) -> Iterator[WeightReading]:
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
                if found.role == row.role and found.kind == RowContent.MEASURED and found.shape == row.shape:
                    yield WeightReading(each, other, found)


def history_of(page: Page, frame: Frame, row: Row, earlier: Sequence[Page]) -> WeightHistory:
    """What is known of a weight that is bad in a forward of `page`. `earlier` are pages of its root, latest first."""
    last = next(readings(page, frame, row, earlier), None)
    if last is None or not last.row.finite:
        return WeightHistory(None, None, "")
    since = [each for each in earlier if each.number > last.page.number]
    steps = page.step - last.page.step - (1 if last.after_step else 0)
    if last.page is page:
        return _changed(last, frame, "it was finite earlier in that batch, and no optimizer step was seen in between")
    if steps <= 0:
        when = f"after step {page.step}" if last.after_step else f"in batch {last.page.batch}"
        return _changed(last, frame, f"it was finite {when}, and no optimizer step was seen in between")
    if not _is_whole([page, *since, last.page]):
        return _open(last, steps)
    if last.after_step:
        when = f"after the step of batch {last.page.batch}"
        return _changed(last, frame, f"it was finite {when}, and no later step on it was seen")
    if _others_stepped([*since, last.page]) and _had_no_gradient([*since, last.page], frame, row):
        when = f"in batch {last.page.batch}"
        return _changed(last, frame, f"it was finite {when}, had no gradient since, and no step on it was seen")
    return _open(last, steps)


def _changed(last: WeightReading, frame: Frame, text: str) -> WeightHistory:
    collectives = ", a collective" if frame.seq > last.frame.seq >= 0 else ""
    return WeightHistory(last, False, f"{text}: the script, a load{collectives} or memory changed it")


def _open(last: WeightReading, steps: int) -> WeightHistory:
    ran = f"{steps} optimizer step{'s' if steps != 1 else ''} ran in between"
    text = (
        f"it was finite in batch {last.page.batch}; {ran}, and it was not read after that: whether a step or something "
        "else changed it is unknown"
    )
    return WeightHistory(last, None, text)


def _is_whole(pages: list[Page]) -> bool:
    batches = [each.batch for each in pages]
    gaps = any(later - before != 1 for later, before in pairwise(batches))
    return not gaps and not any(each.lost_frames for each in pages)


def _others_stepped(pages: list[Page]) -> bool:
    """Whether other weights were read after a step: this one would have been, too, had an optimizer held it."""
    return any(frame.phase == FramePhase.OPTIMIZER and frame.weights for page in pages for frame in page.frames)


def _had_no_gradient(pages: list[Page], frame: Frame, row: Row) -> bool:
    seen = {
        (other.module, found.parsed_role.name)
        for each in pages
        for other in each.frames
        for found in other.gradients
        if found.role_kind is RoleKind.GRAD_WEIGHT and found.kind == RowContent.MEASURED
    }
    return bool(seen) and (frame.module, row.parsed_role.name) not in seen
