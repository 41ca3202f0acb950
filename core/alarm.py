"""When a non-finite value is an alarm, and when it is one that models make on purpose. The one place for that rule.

What is recorded and no alarm:
- an input: a mask, a buffer from `torch.empty`. It becomes one when something bad comes out.
- -inf alone in an output, what masks are made of; except where a module computed it with weights of its own from
  finite inputs.
- an output that is one of the inputs, unchanged or written into.
- a gradient that a GradScaler looks at before it is used.
- what a rule of the user's covers.
"""

from __future__ import annotations

from collections.abc import Iterable

from .frames import Frame, Mark, Page, Row, is_output
from .records import Anomaly, Where
from .values import NonFinite, name_of

EXPECTED = Mark.IGNORED | Mark.PASSED_THROUGH | Mark.SCALED


def alarms(flags: int, *, mark: int = 0, is_output: bool, has_weights: bool, input_flags: int) -> bool:
    """Whether an output, a weight or a gradient with these flags (core.values.NonFinite) and marks is an alarm."""
    if not flags or mark & EXPECTED:
        return False
    return not is_output or flags != NonFinite.NEGINF or (has_weights and not input_flags)


def alarm_of(frame: Frame) -> Row | None:
    """The first row of a frame that is an alarm: a weight, then an output, then a gradient."""
    inputs, weights = frame.inputs, frame.weights
    input_flags = 0
    for row in inputs:
        input_flags |= row.flags
    handed = {row.value for row in inputs if row.value >= 0}
    for row in [*weights, *frame.outputs, *frame.gradients]:
        returned = is_output(row.role)
        if returned and row.value in handed:
            continue
        if alarms(
            row.flags,
            mark=row.mark,
            is_output=returned,
            has_weights=bool(weights),
            input_flags=input_flags,
        ):
            return row
    return None


def first_alarm(frames: Iterable[Frame]) -> tuple[Frame, Row] | None:
    """The first alarm of a page, in the order in which things happened."""
    for frame in frames:
        row = alarm_of(frame)
        if row is not None:
            return frame, row
    return None


def first_expected_gradient(frames: Iterable[Frame]) -> tuple[Frame, Row] | None:
    """The first non-finite gradient of a page that a GradScaler was to catch."""
    for frame in frames:
        for row in frame.gradients:
            if row.flags and row.mark & Mark.SCALED and not row.mark & Mark.IGNORED:
                return frame, row
    return None


def anomaly_of_page(page: Page, *, aborts: bool = False) -> Anomaly | None:
    """The event that a page stands for, when nobody could look at it while it was written."""
    found = first_alarm(sorted(page.frames, key=lambda frame: frame.index))
    return anomaly_of(page, *found, aborts=aborts) if found is not None else None


def anomaly_of(page: Page, frame: Frame, row: Row, *, aborts: bool = False, cause: str = "") -> Anomaly:
    """The event for one row of a page."""
    return Anomaly(
        where=Where(page.rank, page.attempt, page.step, page.batch, page.root, page.number, frame.seq),
        frame=frame.index,
        module=frame.module,
        cls=frame.cls,
        phase=frame.phase,
        role=row.role,
        value=name_of(NonFinite(row.flags)),
        dtype=row.dtype,
        shape=row.shape,
        inputs_finite=all(entry.finite for entry in frame.inputs),
        weights_finite=all(entry.finite for entry in frame.weights),
        aborts=aborts,
        cause=cause,
        collectives=frame.collectives,
    )
