"""What happened between the backward and the end of an optimizer step, from one rank's page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...core.frames import Frame, Mark, Page, Row, format_number
from ...core.judge import first_expected_gradient
from ...core.records import Anomaly, OptimizerStep
from ...core.roles import RoleKind, is_param_group, role_of_parameter
from .local_diagnosis import LocalDiagnosis, Source, diagnosis_of_row, left_before
from .step_rules import KnownStep, can_make_non_finite, is_torchs, square_overflows
from .weight_timeline import readings


def explain_reduced(
    page: Page, frames: list[Frame], frame: Frame, row: Row, anomaly: Anomaly
) -> LocalDiagnosis | tuple[Frame, Row]:
    """A gradient that was non-finite when the optimizer got it; or the one of this rank's own that it came from.

    Only all ranks together tell where it came from, unless a GradScaler was to catch this rank's own gradient.
    """
    left = left_before(page, frame, row, anomaly)
    if left is not None:  # no backward has added to it
        return left
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
    page: Page, frames: list[Frame], frame: Frame, row: Row, anomaly: Anomaly, earlier: Sequence[Page] = ()
) -> LocalDiagnosis | tuple[Frame, Row]:
    """A weight that is non-finite after the step; or the gradient that was non-finite before it.

    `earlier` are pages of the same root from before, latest first.
    """
    gradients = _gradients(frames, frame, f"grad {row.role}")
    bad = next(((f, r) for f in frames if f.index < frame.index for r in f.gradients if not r.finite), None)
    if bad is not None and any(not gradient.finite for gradient in gradients):
        return bad
    last = next(readings(page, frame, row, earlier), None)
    before = last.row if last is not None else None
    was_bad = before is not None and not before.finite
    notes = tuple(_state(frames, frame, row.parsed_role.name))
    source: Source = "weight"
    sure, history = not is_param_group(frame.module), ""  # its gradient has no frames, nor what was computed with it
    if not was_bad and _had_no_gradient(frames, frame, row):
        source, sure = "changed", before is not None and is_torchs(anomaly.optimizer)
        history = "it had no gradient, and a step changes no weight without one"
    elif not was_bad and gradients:
        source, sure, more = _by_rule(frames, frame, row, before, gradients, anomaly.optimizer)
        notes = (*notes, *more)
    found = diagnosis_of_row(
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
    return replace(found, history=history)


def explain_state(
    page: Page, frames: list[Frame], frame: Frame, row: Row, anomaly: Anomaly, earlier: Sequence[Page] = ()
) -> LocalDiagnosis | tuple[Frame, Row]:
    """A non-finite state of an optimizer that is kept in 16 bits; or the gradient that was non-finite before the step.

    States are read after few steps. The last one has made it if its own gradient explains it.
    """
    name = row.parsed_role.name
    gradients = _gradients(frames, frame, f"grad {role_of_parameter(name)}")
    bad = next(((f, r) for f in frames if f.index < frame.index for r in f.gradients if not r.finite), None)
    if bad is not None and any(not gradient.finite for gradient in gradients):
        return bad
    sure, notes = False, []
    last = _last_state(frame, row, earlier)
    if gradients:
        largest = max(map(_number, gradients))
        notes.append(f"the gradient of {name} in that step: abs max {format_number(largest).strip()}")
        only = page.step == 0 or (last is not None and page.step - last[0].step == 1)
        sure = only and square_overflows(anomaly.optimizer, row.parsed_role.key, largest, row.dtype)
    if last is not None:
        when = f"after the step of batch {last[0].batch}: abs max {format_number(last[1].abs_max).strip()}"
        notes.append(f"{row.parsed_role.key} was finite when it was last read, {when}")
    found = diagnosis_of_row(
        page,
        frame,
        row,
        anomaly,
        module=frame.module,
        cls=frame.cls,
        phase="optimizer",
        source="made",
        sure=sure,
        notes=tuple(notes),
    )
    return replace(found, history="" if sure else _state_history(last))


def _last_state(frame: Frame, row: Row, earlier: Sequence[Page]) -> tuple[Page, Row] | None:
    """The last reading of a state from before, if it was finite."""
    for page in earlier:
        for other in page.frames:
            for found in other.states if (other.module, other.phase) == (frame.module, "optimizer") else ():
                if found.role == row.role and found.kind == "measured":
                    return (page, found) if found.finite else None
    return None


def _state_history(last: tuple[Page, Row] | None) -> str:
    rarely = "states are read after few steps (--state-every)"
    if last is None:
        return f"any step up to there can have made it: {rarely}"
    return f"any step since that of batch {last[0].batch} can have made it: it was finite then, and {rarely}"


def _by_rule(
    frames: list[Frame],
    frame: Frame,
    row: Row,
    before: Row | None,
    gradients: list[Row],
    step: OptimizerStep | None,
) -> tuple[Source, bool, tuple[str, ...]]:
    """(source, whether that is sure, lines) for a weight that was finite before a step, and so was its gradient."""
    can = can_make_non_finite(step, _known(frames, frame, row, before, gradients)) if before is not None else None
    used = f"{_name_of(step)}, learning rate {step.settings['lr']:g}" if step and "lr" in step.settings else ""
    notes = (f"the step: {used}",) if used else ()
    if can is False and before is not None:
        largest = format_number(before.abs_max).strip()
        line = f"from a weight of at most {largest} and these gradients, that step's rule gives no such number"
        return "changed", True, (*notes, line)
    return "made", can is True, notes if can else (*notes, _OPEN)


def _had_no_gradient(frames: list[Frame], frame: Frame, row: Row) -> bool:
    """Whether the weight was seen to have no gradient when the step began."""
    return any(
        found.role == f"state grad {row.role}" and found.kind == "none"
        for other in frames
        if other.phase == "optimizer" and other.module == frame.module and other.index >= frame.index
        for found in other.rows
    )


_OPEN = (
    "it is not known whether that step's rule can give it: the step can have made it, or something else has changed "
    "the weight after the forward"
)


def _name_of(step: OptimizerStep) -> str:
    return step.cls.rpartition(".")[2]


def _known(frames: list[Frame], frame: Frame, row: Row, before: Row, gradients: list[Row]) -> KnownStep:
    """What went into the step of one weight."""
    state = {other.parsed_role.key: _number(other) for other in _state_rows(frames, frame, row.parsed_role.name)}
    return KnownStep(
        weight=_number(before),
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
