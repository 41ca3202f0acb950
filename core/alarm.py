"""When a non-finite value is an alarm, and when it is one that models make on purpose. The one place for that rule.

-inf alone is what masks are made of: it is recorded and no alarm, except in the output of a module that computed it
with weights of its own from finite inputs.
"""

from __future__ import annotations

from collections.abc import Iterable

from .frames import Frame, Page, Row
from .records import Anomaly, Where
from .values import NonFinite, name_of


def alarms(flags: int, *, is_output: bool, has_weights: bool, input_flags: int) -> bool:
    """Whether a row with these flags (core.values.NonFinite) is an alarm."""
    if not flags:
        return False
    return flags != NonFinite.NEGINF or (is_output and has_weights and not input_flags)


def first_alarm(frames: Iterable[Frame]) -> tuple[Frame, Row] | None:
    """The first row of a page that is an alarm, in the order in which the calls returned."""
    for frame in frames:
        inputs, outputs, weights = frame.inputs, frame.outputs, frame.weights
        input_flags = 0
        for row in inputs:
            input_flags |= row.flags
        for row in [*weights, *inputs, *outputs]:
            if alarms(
                row.flags,
                is_output=row.role.startswith("output"),
                has_weights=bool(weights),
                input_flags=input_flags,
            ):
                return frame, row
    return None


def anomaly_of_page(page: Page, *, aborts: bool = False) -> Anomaly | None:
    """The event that a page stands for, when nobody could look at it while it was written."""
    found = first_alarm(sorted(page.frames, key=lambda frame: frame.index))
    if found is None:
        return None
    frame, row = found
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
    )
