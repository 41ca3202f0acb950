"""What happened between the backward and the end of an optimizer step, as far as one rank's page tells."""

from __future__ import annotations

from ...core.frames import Frame, Page, Row, format_number
from ...core.records import Anomaly
from ...core.roles import RoleKind
from .local_diagnosis import LocalDiagnosis, diagnosis_of_row


def explain_reduced(page: Page, frames: list[Frame], frame: Frame, row: Row, anomaly: Anomaly) -> LocalDiagnosis:
    """A gradient that was bad when the optimizer got it. Whose fault that is, only all ranks together can tell."""
    local = local_gradients(frames, frame, row.role)
    sure = bool(local)
    notes: tuple[str, ...] = ()
    if any(not before.finite for before in local):  # a bad one that raised no alarm
        sure, notes = False, ("this rank's own gradient was bad before, and a rule or a scaler covers it",)
    return diagnosis_of_row(
        page,
        frame,
        row,
        anomaly,
        module=frame.module,
        cls=frame.cls,
        phase="collective",
        source="reduced",
        sure=sure,
        notes=notes,
    )


def explain_step(
    page: Page, frames: list[Frame], frame: Frame, row: Row, anomaly: Anomaly
) -> LocalDiagnosis | tuple[Frame, Row]:
    """A weight that is bad after the step; or the gradient that was bad before it."""
    gradients = _gradients(frames, frame, f"grad {row.role}")
    bad = next(((f, r) for f in frames if f.index < frame.index for r in f.gradients if not r.finite), None)
    if bad is not None and any(not gradient.finite for gradient in gradients):
        return bad
    before = [
        weight
        for other in frames
        if other.phase == "forward" and other.module == frame.module
        for weight in other.weights
        if weight.role == row.role
    ]
    was_bad = any(not weight.finite for weight in before)
    made = bool(gradients) and not was_bad
    return diagnosis_of_row(
        page,
        frame,
        row,
        anomaly,
        module=frame.module,
        cls=frame.cls,
        phase="optimizer" if made else "weight",
        source="made" if made else "weight",
        notes=tuple(_state(frame, row.parsed_role.name)),
    )


def local_gradients(frames: list[Frame], frame: Frame, role: str) -> list[Row]:
    """The parameter's gradients as this rank's own backward made them."""
    return [
        row
        for other in frames
        if other.phase == "backward" and other.module == frame.module and other.index < frame.index
        for row in other.rows
        if row.role == role and row.kind == "measured"
    ]


def _gradients(frames: list[Frame], frame: Frame, role: str) -> list[Row]:
    """As the optimizer got them, where they were looked at there; else as the backward made them."""
    got = [
        row
        for other in frames
        if other.phase == "collective" and other.module == frame.module and other.index < frame.index
        for row in other.rows
        if row.role == role and row.kind == "measured"
    ]
    return got or local_gradients(frames, frame, role)


def _state(frame: Frame, name: str) -> list[str]:
    """`exp_avg_sq of weight: abs min 0.00e+00, abs max 0.00e+00`, for what the optimizer keeps of a parameter."""
    found = []
    for row in frame.rows:
        role = row.parsed_role
        if role.kind is RoleKind.STATE and role.name == name and row.kind == "measured":
            smallest, largest = format_number(row.abs_min).strip(), format_number(row.abs_max).strip()
            found.append(f"the optimizer's {role.key} of {name}: abs min {smallest}, abs max {largest}")
    return found
