"""The diagnosis of a loss that was not finite when its backward began, from one rank's page. Pure.

All that the modules returned before was finite, or it would have raised the alarm. So the script's own code has made
the value, or was handed it: by the data, by another rank, or by a module in another way than by returning it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...core.frames import Frame, FramePhase, Row, RowKind, module_text
from ...core.values import NonFinite, name_of
from .diagnosis import AlarmPage, LocalDiagnosis

_MOST_TOLD = 4


def explain_loss(alarm: AlarmPage, frame: Frame, row: Row) -> LocalDiagnosis:
    """The diagnosis of a row of a loss. It is sure if nothing but the script's own code can have made the value."""
    again = alarm.again
    returned = what_script_got(alarm.frames)
    notes = [*_of_other_ways(alarm), *_returned_bad(returned)]
    read = (RowKind.MEASURED, RowKind.EMPTY, RowKind.NONE, RowKind.NOT_A_TENSOR)
    is_read = any(row.kind == RowKind.MEASURED for _, row in returned) and all(row.kind in read for _, row in returned)
    sure = not notes and is_read and bool(again.own_code_of) and not (again.held or again.threads)
    if again.proved:
        return alarm.diagnosis(frame, row, "outside", FramePhase.LOSS, sure=True, proved=True)
    return alarm.diagnosis(frame, row, "outside", FramePhase.LOSS, sure=sure, notes=notes)


def _of_other_ways(alarm: AlarmPage) -> Iterator[str]:
    """Modules whose own code made a tensor that the loss used, and that no frame shows."""
    for each in alarm.again.own_code[:_MOST_TOLD]:
        name = module_text(each.module, each.cls)
        yield f"the loss used a tensor that {name} had not returned ({each.op}): the value may have been made there"


def what_script_got(frames: Iterable[Frame]) -> list[tuple[Frame, Row]]:
    """What the calls of the script itself have returned; empty if the model's own call is not watched."""
    calls = (frame for frame in frames if frame.phase == FramePhase.FORWARD and frame.parent is None)
    return [(frame, row) for frame in calls for row in frame.outputs]


def _returned_bad(returned: list[tuple[Frame, Row]]) -> Iterator[str]:
    """Results that were not finite and raised no alarm: a mask, or what a rule of the user's waives."""
    for frame, row in [each for each in returned if not each[1].finite][:_MOST_TOLD]:
        what = f"{module_text(frame.module, frame.cls)} had returned {name_of(NonFinite(row.flags))}"
        yield f"{what}, which is no alarm there: the loss may have been made from that"
