"""The cause of a change of a weight or gradient between a backward and the next forward, from a rank's pages. Pure."""

from __future__ import annotations

import math

from ...core.frames import Frame, FramePhase, Row, RowKind, RowMark
from ...core.judge import first_expected_gradient
from ...core.roles import RoleKind, is_param_group, role_of_parameter
from .diagnosis import AlarmPage, LocalDiagnosis, Source, number_text, rows_in
from .diagnosis_parts import WeightEvidence
from .optimizer_rules import KnownStep, can_make_non_finite, is_torchs, square_overflows
from .weight_history import readings_of


def explain_reduced(alarm: AlarmPage, frame: Frame, row: Row) -> LocalDiagnosis | tuple[Frame, Row]:
    """A gradient that was non-finite when the optimizer got it; or the one of this rank's own that it came from.

    Only all ranks together tell where it came from, unless a GradScaler was to catch this rank's own gradient.
    """
    left = alarm.left_before(frame, row)
    if left is not None:  # no backward has added to it
        return left
    local = rows_in(alarm.frames, FramePhase.BACKWARD, frame, row.role, before=True)
    bad = [before for before in local if not before.finite]
    if any(before.mark & RowMark.SCALED for before in bad):
        first = first_expected_gradient(other for other in alarm.frames if other.index < frame.index)
        if first is not None:
            return first
    # a non-finite one that raised no alarm
    notes = ["this rank's own gradient was non-finite before: a rule waives it"] if bad else []
    return alarm.diagnosis(frame, row, "reduced", FramePhase.COLLECTIVE, sure=bool(local) and not bad, notes=notes)


def explain_step(alarm: AlarmPage, frame: Frame, row: Row) -> LocalDiagnosis | tuple[Frame, Row]:
    """A weight, or a state of an optimizer kept in 16 bits, that is non-finite after the step; or the gradient that was
    non-finite before it."""
    name = row.parsed_role.name
    is_state = row.role_kind is RoleKind.STATE
    role = f"grad {role_of_parameter(name) if is_state else row.role}"
    gradients = rows_in(alarm.frames, FramePhase.COLLECTIVE, frame, role, before=True)
    gradients = gradients or rows_in(alarm.frames, FramePhase.BACKWARD, frame, role, before=True)
    bad = next(((f, r) for f in alarm.frames if f.index < frame.index for r in f.gradients if not r.finite), None)
    if bad is not None and any(not gradient.finite for gradient in gradients):
        return bad
    return (_explain_state if is_state else _explain_weight)(alarm, frame, row, gradients)


def _explain_weight(alarm: AlarmPage, frame: Frame, row: Row, gradients: list[Row]) -> LocalDiagnosis:
    last = next(readings_of(alarm.page, frame, row, alarm.earlier), None)
    before = last.row if last is not None else None
    was_bad = before is not None and not before.finite
    of_step, name = _rows_of_step(alarm.frames, frame), row.parsed_role.name
    states = [each for each in of_step if each.role_kind is RoleKind.STATE and each.parsed_role.name == name]
    had_none = any(each.role == f"state grad {row.role}" and each.kind == RowKind.NONE for each in of_step)
    notes = [
        f"the optimizer's {state.parsed_role.key} of {name}: abs min "
        f"{number_text(state.abs_min)}, abs max {number_text(state.abs_max)}"
        for state in states
        if state.kind == RowKind.MEASURED
    ]
    step = alarm.anomaly.optimizer
    source: Source = "weight"
    sure, history = not is_param_group(frame.module), ""  # its gradient has no frames, nor what was computed with it
    if alarm.again.gradient:
        history = f"its gradient was {alarm.again.gradient}, as the backward before that step had made it"
    if not was_bad and had_none:
        source, sure = "changed", before is not None and is_torchs(step)
        history = "it had no gradient, and a step changes no weight without one"
    elif not was_bad and gradients:
        known = _known(row, before, gradients, states) if before is not None else None
        can = can_make_non_finite(step, known) if known is not None else None
        source, sure = ("changed", True) if can is False else ("made", can is True)
        if step is not None and "lr" in step.settings:
            notes.append(f"the step: {step.cls.rpartition('.')[2]}, learning rate {step.settings['lr']:g}")
        if can is False and before is not None:
            rule = "that step's update rule gives no such number"
            notes.append(f"from a weight of at most {number_text(before.abs_max)} and these gradients, {rule}")
        elif can is None:
            notes.append(_OPEN)
    phase = FramePhase.OPTIMIZER if source == "made" else FramePhase.WEIGHT
    return alarm.diagnosis(frame, row, source, phase, sure=sure, notes=notes, weight=WeightEvidence(history=history))


def _explain_state(alarm: AlarmPage, frame: Frame, row: Row, gradients: list[Row]) -> LocalDiagnosis:
    """States are read after few steps. The last one has made it if its own gradient explains it."""
    sure, notes = False, []
    pages = ((page, rows_in(page.frames, FramePhase.OPTIMIZER, frame, row.role)) for page in alarm.earlier)
    last = next(((page, rows[0]) for page, rows in pages if rows), None)
    last = last if last is not None and last[1].finite else None
    key = row.parsed_role.key
    if gradients:
        largest = max(map(_number, gradients))
        notes.append(f"the gradient of {row.parsed_role.name} in that step: abs max {number_text(largest)}")
        only = alarm.page.step == 0 or (last is not None and alarm.page.step - last[0].step == 1)
        sure = only and square_overflows(alarm.anomaly.optimizer, key, largest, row.dtype)
    rarely = "states are read only after some steps (--state-every)"
    history = f"any step up to that point can have made it: {rarely}"
    if last is not None:
        batch = last[0].batch
        when = f"after the step of batch {batch}: abs max {number_text(last[1].abs_max)}"
        notes.append(f"{key} was finite when it was last read, {when}")
        history = f"any step since that of batch {batch} can have made it: it was finite then, and {rarely}"
    history = "" if sure else history
    return alarm.diagnosis(
        frame, row, "made", FramePhase.OPTIMIZER, sure=sure, notes=notes, weight=WeightEvidence(history=history)
    )


_OPEN = (
    "it is unknown whether that step's update rule can give it: the step can have made it, or something else changed "
    "the weight after the forward"
)


def _known(row: Row, before: Row, gradients: list[Row], states: list[Row]) -> KnownStep:
    state = {state.parsed_role.key: _number(state) for state in states}
    elements = math.prod(row.shape) if row.shape is not None else 1 << 40
    least = {state.parsed_role.key: state.abs_min for state in states}
    return KnownStep(_number(before), max(map(_number, gradients)), state, elements, row.dtype, least)


def _number(row: Row) -> float:
    return row.abs_max if row.finite and row.abs_max is not None else math.inf


def _rows_of_step(frames: list[Frame], frame: Frame) -> list[Row]:
    """The module of a weight: in its frame, or on a device in one that was written when its numbers came."""
    return [
        row
        for other in frames
        if other.phase == FramePhase.OPTIMIZER and other.module == frame.module and other.index >= frame.index
        for row in other.rows
    ]
