"""What happened between the backward and the end of an optimizer step, from one rank's page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...core.events import Anomaly, OptimizerStep
from ...core.frames import Frame, FramePhase, Page, Row, RowContent, RowMark, format_number
from ...core.judge import first_expected_gradient
from ...core.roles import RoleKind, is_param_group, role_of_parameter
from ...core.values import DTYPE_MAX
from .diagnosis import LocalDiagnosis, Source, diagnosis_of_row, left_before
from .weight_timeline import readings

# Whether an optimizer's rule can have made a weight non-finite, from what is known of the step. Pure.
#
# Each rule gives the largest change that a step can make, from the largest gradient, weight and state. If weight and
# change together are far below the dtype's largest number, the step did not make it: the weight was changed by
# something else, between the forward and the step.
#
# SGD     lr 0.1, gradient at most 2.0, weight at most 0.5   ->  at most 0.5 + 0.2: the step cannot make an inf
# SGD     lr 3e38, the same                                  ->  beyond float32: it can

_MARGIN = 2.0**-8
"""A sum of many terms is rounded: what is this far below the dtype's largest number cannot overflow."""
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
"""The smallest positive number of a dtype: an eps below it is 0."""


class KnownStep(NamedTuple):
    """What went into the step of one weight. All numbers are abs max, and finite."""

    weight: float
    gradient: float
    state: Mapping[str, float]
    elements: int
    dtype: str


@dataclass(frozen=True)
class _StepRule:
    change: Callable[[Mapping[str, float], KnownStep], float | None]
    """The largest change; None if that is not known."""
    needs: tuple[str, ...] = ()
    """Keys of the state without which nothing is known."""


def can_make_non_finite(step: OptimizerStep | None, known: KnownStep) -> bool | None:
    """Whether the step can have made the weight non-finite; None if that cannot be told."""
    largest = DTYPE_MAX.get(known.dtype)
    if step is None or largest is None or known.dtype not in _SMALLEST:
        return None
    rule = _RULES.get(step.cls.rpartition(".")[2]) if is_torchs(step) else None
    if rule is None or any(key not in known.state for key in rule.needs) or "lr" not in step.settings:
        return None
    numbers = (known.weight, known.gradient, *known.state.values())
    if not all(math.isfinite(number) for number in numbers):
        return None
    change = rule.change(step.settings, known)
    if change is None:
        return None
    decay = abs(step.settings["lr"] * step.settings.get("weight_decay", 0.0)) * known.weight
    return not known.weight + decay + change < largest * _MARGIN


def is_torchs(step: OptimizerStep | None) -> bool:
    """Whether the optimizer is one of torch's own."""
    return step is not None and step.cls.startswith("torch.optim.")


def square_overflows(step: OptimizerStep | None, key: str, gradient: float, dtype: str) -> bool:
    """Whether a mean of squares overflows in this very step, of a gradient of this abs max: by torch's own Adam.

    >>> adam = OptimizerStep("torch.optim.adam.Adam", {"betas[1]": 0.999})
    >>> square_overflows(adam, "exp_avg_sq", 1e4, "float16"), square_overflows(adam, "exp_avg_sq", 300.0, "float16")
    (True, False)
    """
    largest, share = DTYPE_MAX.get(dtype), 1 - step.settings.get("betas[1]", 1.0) if step is not None else 0.0
    if largest is None or key != "exp_avg_sq" or not is_torchs(step) or not 0 < share <= 1:
        return False
    return share * gradient * gradient > largest


def _sgd(settings: Mapping[str, float], known: KnownStep) -> float | None:
    gradient = known.gradient + abs(settings.get("weight_decay", 0.0)) * known.weight
    momentum = abs(settings.get("momentum", 0.0))
    if not momentum:
        return abs(settings["lr"]) * gradient
    if "momentum_buffer" not in known.state:
        return None
    return abs(settings["lr"]) * (gradient + (1 + momentum) * known.state["momentum_buffer"])


def _adam(settings: Mapping[str, float], known: KnownStep) -> float | None:
    eps = _eps(settings, known)
    correction = 1 - settings.get("betas[0]", math.nan)
    if eps is None or not 0 < correction <= 1:
        return None
    return abs(settings["lr"]) * known.state["exp_avg"] / correction / eps


def _adagrad(settings: Mapping[str, float], known: KnownStep) -> float | None:
    eps = _eps(settings, known)
    gradient = known.gradient + abs(settings.get("weight_decay", 0.0)) * known.weight
    return abs(settings["lr"]) * gradient / eps if eps is not None else None


def _rmsprop(settings: Mapping[str, float], known: KnownStep) -> float | None:
    eps = _eps(settings, known)
    if eps is None or settings.get("centered"):  # the variance minus the mean's square may be negative: nan
        return None
    gradient = known.gradient + abs(settings.get("weight_decay", 0.0)) * known.weight
    buffer = known.state.get("momentum_buffer", 0.0) if settings.get("momentum") else 0.0
    if settings.get("momentum") and "momentum_buffer" not in known.state:
        return None
    return abs(settings["lr"]) * (gradient / eps + buffer)


def _adafactor(settings: Mapping[str, float], known: KnownStep) -> float | None:
    """Its update is divided by its own root mean square, so it is at most `sqrt(elements)` times `d` times the rate."""
    largest = DTYPE_MAX[known.dtype]
    d, elements = settings.get("d"), max(1, known.elements)
    if d is None or not d > 0 or known.gradient * elements > math.sqrt(largest):
        return None
    return abs(settings["lr"]) * max(1e-3, settings.get("eps[1]", 1e-3), known.weight) * math.sqrt(elements) * d


def _eps(settings: Mapping[str, float], known: KnownStep) -> float | None:
    """What the update is divided by at least; None if that may be 0, and 0 / 0 is nan."""
    eps = settings.get("eps", 0.0)
    return eps if eps > _SMALLEST[known.dtype] else None


_RULES = {
    "SGD": _StepRule(_sgd),
    "Adam": _StepRule(_adam, ("exp_avg", "exp_avg_sq")),
    "AdamW": _StepRule(_adam, ("exp_avg", "exp_avg_sq")),
    "Adagrad": _StepRule(_adagrad, ("sum",)),
    "RMSprop": _StepRule(_rmsprop, ("square_avg",)),
    "Adafactor": _StepRule(_adafactor),
}


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
    if any(before.mark & RowMark.SCALED for before in bad):
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
        phase=FramePhase.COLLECTIVE,
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
        phase=FramePhase.OPTIMIZER if source == "made" else FramePhase.WEIGHT,
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
        phase=FramePhase.OPTIMIZER,
        source="made",
        sure=sure,
        notes=tuple(notes),
    )
    return replace(found, history="" if sure else _state_history(last))


def _last_state(frame: Frame, row: Row, earlier: Sequence[Page]) -> tuple[Page, Row] | None:
    for page in earlier:
        for other in page.frames:
            for found in other.states if (other.module, other.phase) == (frame.module, FramePhase.OPTIMIZER) else ():
                if found.role == row.role and found.kind == RowContent.MEASURED:
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
    return any(
        found.role == f"state grad {row.role}" and found.kind == RowContent.NONE
        for other in frames
        if other.phase == FramePhase.OPTIMIZER and other.module == frame.module and other.index >= frame.index
        for found in other.rows
    )


_OPEN = (
    "it is not known whether that step's rule can give it: the step can have made it, or something else has changed "
    "the weight after the forward"
)


def _name_of(step: OptimizerStep) -> str:
    return step.cls.rpartition(".")[2]


def _known(frames: list[Frame], frame: Frame, row: Row, before: Row, gradients: list[Row]) -> KnownStep:
    state = {other.parsed_role.key: _number(other) for other in _state_rows(frames, frame, row.parsed_role.name)}
    return KnownStep(
        weight=_number(before),
        gradient=max(map(_number, gradients)),
        state=state,
        elements=math.prod(row.shape) if row.shape is not None else 1 << 40,
        dtype=row.dtype,
    )


def _number(row: Row) -> float:
    return row.abs_max if row.finite and row.abs_max is not None else math.inf


def local_gradients(frames: list[Frame], frame: Frame, role: str) -> list[Row]:
    """The parameter's gradients, as this rank's own backward made them."""
    return [
        row
        for other in frames
        if other.phase == FramePhase.BACKWARD and other.module == frame.module and other.index < frame.index
        for row in other.rows
        if row.role == role and row.kind == RowContent.MEASURED
    ]


def _gradients(frames: list[Frame], frame: Frame, role: str) -> list[Row]:
    got = [
        row
        for other in frames
        if other.phase == FramePhase.COLLECTIVE and other.module == frame.module and other.index < frame.index
        for row in other.rows
        if row.role == role and row.kind == RowContent.MEASURED
    ]
    return got or local_gradients(frames, frame, role)


def _state(frames: list[Frame], frame: Frame, name: str) -> list[str]:
    """`exp_avg_sq of weight: abs min 0.00e+00, abs max 0.00e+00`, for each tensor of a parameter's state."""
    found = []
    for row in _state_rows(frames, frame, name):
        if row.kind == RowContent.MEASURED:
            smallest, largest = format_number(row.abs_min).strip(), format_number(row.abs_max).strip()
            found.append(f"the optimizer's {row.parsed_role.key} of {name}: abs min {smallest}, abs max {largest}")
    return found


def _state_rows(frames: list[Frame], frame: Frame, name: str) -> list[Row]:
    """A parameter's state: in the frame of the weight, or on a device in one that was written when its numbers came."""
    steps = (other for other in frames if other.phase == FramePhase.OPTIMIZER and other.index >= frame.index)
    of_module = [other for other in steps if other.module == frame.module]
    rows = [row for other in of_module for row in other.rows]
    return [row for row in rows if row.role_kind is RoleKind.STATE and row.parsed_role.name == name]
