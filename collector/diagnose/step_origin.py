"""What happened between the backward and the end of an optimizer step, from one rank's page."""

from __future__ import annotations

from ...core.frames import Frame, Page, Row, format_number
from ...core.records import Anomaly
from ...core.roles import RoleKind
from .local_diagnosis import LocalDiagnosis, diagnosis_of_row


def explain_reduced(page: Page, frames: list[Frame], frame: Frame, row: Row, anomaly: Anomaly) -> LocalDiagnosis:
    """A gradient that was non-finite when the optimizer got it. Only all ranks together tell where it came from."""
    local = local_gradients(frames, frame, row.role)
    sure = bool(local)
    notes: tuple[str, ...] = ()
    if any(not before.finite for before in local):  # a non-finite one that raised no alarm
        sure, notes = (
            False,
            ("this rank's own gradient was non-finite before: a rule waives it, or a GradScaler was to catch it",),
        )
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
    """A weight that is non-finite after the step; or the gradient that was non-finite before it."""
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
        notes=tuple(_state(frames, frame, row.parsed_role.name)),
    )


def local_gradients(frames: list[Frame], frame: Frame, role: str) -> list[Row]:
    """The parameter's gradients, as this rank's own backward made them."""
    return [
        row
        for other in frames
        if other.phase == "backward" and other.module == frame.module and other.index < frame.index
        for row in other.rows
        if row.role == role and row.kind == "measured"
    ]


def _gradients(frames: list[Frame], frame: Frame, role: str) -> list[Row]:
    """The gradients that the optimizer got, if those were read; else those that the backward made."""
    got = [
        row
        for other in frames
        if other.phase == "collective" and other.module == frame.module and other.index < frame.index
        for row in other.rows
        if row.role == role and row.kind == "measured"
    ]
    return got or local_gradients(frames, frame, role)


def _state(frames: list[Frame], frame: Frame, name: str) -> list[str]:
    """`exp_avg_sq of weight: abs min 0.00e+00, abs max 0.00e+00`, for each tensor of a parameter's state.

    It stands in the frame of the weight, or on a device in a later frame, which was written when its numbers arrived.
    """
    found = []
    of_module = [f for f in frames if f.phase == "optimizer" and f.module == frame.module and f.index >= frame.index]
    for row in (row for other in of_module for row in other.rows):
        role = row.parsed_role
        if role.kind is RoleKind.STATE and role.name == name and row.kind == "measured":
            smallest, largest = format_number(row.abs_min).strip(), format_number(row.abs_max).strip()
            found.append(f"the optimizer's {role.key} of {name}: abs min {smallest}, abs max {largest}")
    return found
