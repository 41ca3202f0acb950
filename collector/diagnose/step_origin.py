"""What happened between the backward and the end of an optimizer step, from one rank's page."""

from __future__ import annotations

import math

from ...core.frames import Frame, Mark, Page, Row, format_number
from ...core.judge import first_expected_gradient
from ...core.records import Anomaly, OptimizerStep
from ...core.roles import RoleKind, is_param_group
from .local_diagnosis import LocalDiagnosis, Source, diagnosis_of_row
from .step_rules import KnownStep, can_make_non_finite


def explain_reduced(
    page: Page, frames: list[Frame], frame: Frame, row: Row, anomaly: Anomaly
) -> LocalDiagnosis | tuple[Frame, Row]:
    """A gradient that was non-finite when the optimizer got it; or the one of this rank's own that it came from.

    Only all ranks together tell where it came from, unless a GradScaler was to catch this rank's own gradient.
    """
    local = local_gradients(frames, frame, row.role)
    sure = bool(local)
    notes: tuple[str, ...] = ()
    bad = [before for before in local if not before.finite]
    if any(before.mark & Mark.SCALED for before in bad):
        first = first_expected_gradient(other for other in frames if other.index < frame.index)
        if first is not None:
            return first
    if bad:  # a non-finite one that raised no alarm
        sure, notes = False, ("this rank's own gradient was non-finite before: a rule waives it",)
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
    notes = tuple(_state(frames, frame, row.parsed_role.name))
    source: Source = "made" if made else "weight"
    sure = not is_param_group(frame.module)  # its gradient has no frames, nor what was computed with it
    if made:
        step = anomaly.optimizer
        can = can_make_non_finite(step, _known(frames, frame, row, before, gradients)) if before else None
        used = f"{_name_of(step)}, learning rate {step.settings['lr']:g}" if step and "lr" in step.settings else ""
        notes = (*notes, *([f"the step: {used}"] if used else []))
        if can is False:
            source = "changed"
            largest = format_number(before[-1].abs_max).strip()
            notes = (
                *notes,
                f"from a weight of at most {largest} and these gradients, that step's rule gives no such number",
            )
        elif can is None:
            sure = False
            notes = (*notes, _OPEN)
    return diagnosis_of_row(
        page,
        frame,
        row,
        anomaly,
        module=frame.module,
        cls=frame.cls,
        phase="optimizer" if source == "made" else "weight",
        source=source,
        sure=sure,
        notes=notes,
    )


_OPEN = (
    "it is not known whether that step's rule can give it: the step can have made it, or something else has changed "
    "the weight after the forward"
)


def _name_of(step: OptimizerStep) -> str:
    return step.cls.rpartition(".")[2]


def _known(frames: list[Frame], frame: Frame, row: Row, before: list[Row], gradients: list[Row]) -> KnownStep:
    """What went into the step of one weight."""
    state = {other.parsed_role.key: _number(other) for other in _state_rows(frames, frame, row.parsed_role.name)}
    return KnownStep(
        weight=max(map(_number, before)),
        gradient=max(map(_number, gradients)),
        state=state,
        elements=math.prod(row.shape) if row.shape is not None else 1 << 40,
        dtype=row.dtype,
    )


def _number(row: Row) -> float:
    """A row's abs max; inf where it is not finite or not known."""
    return row.abs_max if row.finite and row.abs_max is not None else math.inf


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
    """`exp_avg_sq of weight: abs min 0.00e+00, abs max 0.00e+00`, for each tensor of a parameter's state."""
    found = []
    for row in _state_rows(frames, frame, name):
        if row.kind == "measured":
            smallest, largest = format_number(row.abs_min).strip(), format_number(row.abs_max).strip()
            found.append(f"the optimizer's {row.parsed_role.key} of {name}: abs min {smallest}, abs max {largest}")
    return found


def _state_rows(frames: list[Frame], frame: Frame, name: str) -> list[Row]:
    """A parameter's state: in the frame of the weight, or on a device in one that was written when its numbers came."""
    of_module = [f for f in frames if f.phase == "optimizer" and f.module == frame.module and f.index >= frame.index]
    rows = [row for other in of_module for row in other.rows]
    return [row for row in rows if row.role_kind is RoleKind.STATE and row.parsed_role.name == name]
