"""The diagnosis of a loss that was not finite when its backward began, from one rank's page. Pure.

All that the modules returned before was finite, or it would have raised the alarm. So the script's own code has made
the value, or was handed it: by the data, by another rank, or by a module in another way than by returning it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...core.frames import Frame, FramePhase, Row, RowKind, module_text
from ...core.values import NonFinite, name_of
from .diagnosis import AlarmPage, LocalDiagnosis

_MOST_TOLD = 4


def explain_loss(alarm: AlarmPage, frame: Frame, row: Row) -> LocalDiagnosis:
    """The diagnosis of a row of a loss. It is sure if nothing but the script's own code can have made the value."""
    again = alarm.again
    notes = [*_of_other_ways(alarm), *_returned_bad(alarm.frames)]
    sure = not notes and bool(again.own_code_of) and _is_model_finite(alarm.frames)
    sure = sure and not (again.held or again.threads)
    return alarm.diagnosis(frame, row, "outside", FramePhase.LOSS, sure=sure, notes=notes)


def _of_other_ways(alarm: AlarmPage) -> Iterator[str]:
    """Modules whose own code made a tensor that the loss used, and that no frame shows."""
    for each in alarm.again.own_code[:_MOST_TOLD]:
        name = module_text(each.module, each.cls)
        yield f"the loss used a tensor that {name} had not returned ({each.op}): the value may have been made there"


def _returned_bad(frames: list[Frame]) -> Iterator[str]:
    """Calls whose result was not finite and raised no alarm: a mask, or what a rule of the user's waives."""
    forward = (frame for frame in frames if frame.phase == FramePhase.FORWARD)
    bad = {(frame.module, frame.cls): row for frame in forward for row in frame.outputs if not row.finite}
    for (module, cls), row in list(bad.items())[:_MOST_TOLD]:
        returned = f"{module_text(module, cls)} had returned {name_of(NonFinite(row.flags))}, which is no alarm there"
        yield f"{returned}: the loss may have been made from that"


def _is_model_finite(frames: list[Frame]) -> bool:
    """Whether the page shows the model's own call, and that its results were finite."""
    calls = [frame for frame in frames if frame.phase == FramePhase.FORWARD and frame.parent is None]
    shown = [row for frame in calls if not frame.module for row in frame.outputs]
    read = (RowKind.MEASURED, RowKind.EMPTY, RowKind.NONE, RowKind.NOT_A_TENSOR)
    return any(row.kind == RowKind.MEASURED for row in shown) and all(row.finite and row.kind in read for row in shown)
