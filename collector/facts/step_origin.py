"""The cause of a change of a weight or gradient between a backward and the next forward, from a rank's pages. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ...core.events.looked_again import OptimizerStep
from ...core.frames import Frame, FramePhase, Page, Row, RowKind, RowMark
from ...core.judge import first_expected_gradient
from ...core.roles import RoleKind, is_param_group, role_of_parameter
from ...core.values import DTYPE_MAX
from ..report.sentence_parts import counted
from .diagnosis import AlarmPage, LocalDiagnosis, Source, number_text, rows_in
from .diagnosis_parts import WeightEvidence

# Whether an optimizer's rule can have made a weight non-finite, from the known numbers of the step. Pure.
#
# Each rule gives the largest change that a step can make, from the largest gradient, weight and state. If weight and
# change together are far below the dtype's largest number, the step did not make it: the weight was changed by
# something else, between the forward and the step.
#
# SGD     lr 0.1, gradient at most 2.0, weight at most 0.5   ->  at most 0.5 + 0.2: the step cannot make an inf
# SGD     lr 3e38, the same                                  ->  beyond float32: it can

_MARGIN = 2.0**-8
"""Sums of many terms are rounded: a bound below this share of the dtype's maximum cannot overflow."""
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
"""The smallest positive number of a dtype: an eps below it is 0."""


class KnownStep(NamedTuple):
    """The inputs of the step of one weight. All numbers but `least` are abs max, and finite."""

    weight: float
    gradient: float
    state: Mapping[str, float]
    elements: int
    dtype: str
    least: Mapping[str, float | None] = {}
    """abs min of each state after the step."""


def can_make_non_finite(step: OptimizerStep | None, known: KnownStep) -> bool | None:
    """Whether the step can have made the weight non-finite; None if that is unknown."""
    largest = DTYPE_MAX.get(known.dtype)
    if step is None or largest is None or known.dtype not in _SMALLEST:
        return None
    rule, needs = _RULES.get(step.cls.rpartition(".")[2], (None, ())) if is_torchs(step) else (None, ())
    if rule is None or any(key not in known.state for key in needs) or "lr" not in step.settings:
        return None
    if not all(map(math.isfinite, (known.weight, known.gradient, *known.state.values()))):
        return None
    change = rule(step.settings, known)
    if change is None:
        return True if _divides_by_zero(step.settings, known) else None
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
    momentum = abs(settings.get("momentum", 0.0))
    buffer = known.state.get("momentum_buffer") if momentum else 0.0
    if buffer is None:
        return None
    return abs(settings["lr"]) * (_decayed(settings, known) + (1 + momentum) * buffer)


def _adam(settings: Mapping[str, float], known: KnownStep) -> float | None:
    eps = _eps(settings, known)
    correction = 1 - settings.get("betas[0]", math.nan)
    if eps is None or not 0 < correction <= 1:
        return None
    return abs(settings["lr"]) * known.state["exp_avg"] / correction / eps


def _adagrad(settings: Mapping[str, float], known: KnownStep) -> float | None:
    eps = _eps(settings, known)
    return abs(settings["lr"]) * _decayed(settings, known) / eps if eps is not None else None


def _rmsprop(settings: Mapping[str, float], known: KnownStep) -> float | None:
    eps = _eps(settings, known)
    if eps is None or settings.get("centered"):  # the variance minus the mean's square may be negative: nan
        return None
    buffer = known.state.get("momentum_buffer") if settings.get("momentum") else 0.0
    return abs(settings["lr"]) * (_decayed(settings, known) / eps + buffer) if buffer is not None else None


def _adafactor(settings: Mapping[str, float], known: KnownStep) -> float | None:
    """Its update is divided by its own root mean square, so it is at most `sqrt(elements)` times `d` times the rate."""
    largest = DTYPE_MAX[known.dtype]
    d, elements = settings.get("d"), max(1, known.elements)
    if d is None or not d > 0 or known.gradient * elements > math.sqrt(largest):
        return None
    return abs(settings["lr"]) * max(1e-3, settings.get("eps[1]", 1e-3), known.weight) * math.sqrt(elements) * d


def _decayed(settings: Mapping[str, float], known: KnownStep) -> float:
    """The gradient with the decay of the weight in it."""
    return known.gradient + abs(settings.get("weight_decay", 0.0)) * known.weight


def _eps(settings: Mapping[str, float], known: KnownStep) -> float | None:
    """The smallest divisor of the update; None if it may be 0, as 0 / 0 is nan."""
    eps = settings.get("eps", 0.0)
    return eps if eps > _SMALLEST[known.dtype] else None


def _divides_by_zero(settings: Mapping[str, float], known: KnownStep) -> bool:
    """Whether an element's divisor is 0 for certain: no eps, and a mean of squares that is 0."""
    is_other = settings.get("amsgrad") or settings.get("centered")  # these divide by another number
    is_zero = any(known.least.get(key) == 0 for key in ("exp_avg_sq", "sum", "square_avg"))
    return settings.get("eps") == 0 and not is_other and is_zero


_RULES: dict[str, tuple[Callable[[Mapping[str, float], KnownStep], float | None], tuple[str, ...]]] = {
    "SGD": (_sgd, ()),
    "Adam": (_adam, ("exp_avg", "exp_avg_sq")),
    "AdamW": (_adam, ("exp_avg", "exp_avg_sq")),
    "Adagrad": (_adagrad, ("sum",)),
    "RMSprop": (_rmsprop, ("square_avg",)),
    "Adafactor": (_adafactor, ()),
}
"""Optimizer -> (the largest change that its step can make, None if that is not known; keys of the state without which
nothing is known)."""


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
    last = next(_readings(alarm.page, frame, row, alarm.earlier), None)
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


# When a weight was last read and finite, and whether an optimizer step can have changed it since.
#
# A weight is read in each forward, and after each step of an optimizer that holds it. A weight that was finite after
# the last step and is bad in the next forward was changed by something else: the script, a load, or memory. A weight
# that no row shows after a step that has run since leaves open which of them it was.

UNSEEN = "no optimizer step was seen in between: the script, a load or memory changed it"


class WeightReading(NamedTuple):
    """One reading of a weight."""

    page: Page
    frame: Frame
    row: Row

    @property
    def after_step(self) -> bool:
        """It was read after a step of an optimizer that holds it; else in a forward."""
        return self.frame.phase == FramePhase.OPTIMIZER


class WeightHistory(NamedTuple):
    """The earlier readings of a bad weight."""

    changed: bool = False
    """Something else than a step has changed it since it was finite."""
    text: str = ""
    """A clause for the sentence of a verdict; "" if nothing is known."""
    note: str = ""
    """A line of evidence; "" if there is no finite reading."""


def _readings(page: Page, frame: Frame, row: Row, earlier: Sequence[Page]) -> Iterator[WeightReading]:
    """The readings of a weight from before `frame` of `page`, the latest first. `earlier` are pages, latest first.

    One of another shape is left out: a shard is not the whole weight.
    """
    for each in (page, *earlier):
        for other in sorted(each.frames, key=lambda found: -found.index):
            if other.module != frame.module or (each is page and other.index >= frame.index):
                continue
            if other.phase not in (FramePhase.FORWARD, FramePhase.OPTIMIZER):
                continue
            for found in other.weights:
                if found.role == row.role and found.kind == RowKind.MEASURED and found.shape == row.shape:
                    yield WeightReading(each, other, found)


def history_of(page: Page, frame: Frame, row: Row, earlier: Sequence[Page]) -> WeightHistory:
    """Earlier readings of a weight that is bad in a forward of `page`; `earlier` pages of its root are latest first."""
    last = next(_readings(page, frame, row, earlier), None)
    if last is None or not last.row.finite:
        return WeightHistory()
    since = [each for each in earlier if each.number > last.page.number]
    steps = page.step - last.page.step - (1 if last.after_step else 0)
    batch = last.page.batch
    text = ""
    if last.page is page or steps <= 0:
        when = f"after step {page.step}" if last.after_step else f"in batch {batch}"
        when = "earlier in that batch" if last.page is page else when
        text = f"{when}, and no optimizer step was seen in between"
    elif _is_whole([page, *since, last.page]):
        if last.after_step:
            text = f"after the step of batch {batch}, and no later step on it was seen"
        elif _stepped_without_it([*since, last.page], frame, row):
            text = f"in batch {batch}, had no gradient since, and no step on it was seen"
    when = "after the step of" if last.after_step else "in the forward of"
    note = f"{row.role} was finite when it was last read, {when} batch {batch}: abs max {number_text(last.row.abs_max)}"
    if text:
        collective = ", a collective" if frame.seq > last.frame.seq >= 0 else ""
        return WeightHistory(True, f"it was finite {text}: the script, a load{collective} or memory changed it", note)
    ran = f"{counted(steps, 'optimizer step')} ran in between, and it was not read after that"
    text = f"it was finite in batch {batch}; {ran}: whether a step or something else changed it is unknown"
    return WeightHistory(False, text, note)


def _is_whole(pages: list[Page]) -> bool:
    batches = [each.batch for each in pages]
    gaps = any(later - before != 1 for later, before in pairwise(batches))
    return not gaps and not any(each.lost_frames for each in pages)


def _stepped_without_it(pages: list[Page], frame: Frame, row: Row) -> bool:
    """Whether other weights had gradients and were read after a step: so would this one, had an optimizer held it."""
    frames = [other for page in pages for other in page.frames]
    seen = {
        (other.module, found.parsed_role.name)
        for other in frames
        for found in other.gradients
        if found.role_kind is RoleKind.GRAD_WEIGHT and found.kind == RowKind.MEASURED
    }
    stepped = any(other.phase == FramePhase.OPTIMIZER and other.weights for other in frames)
    return stepped and bool(seen) and (frame.module, row.parsed_role.name) not in seen
