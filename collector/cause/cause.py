"""Why a non-finite value was made: its cause, and what to do about it. Pure.

The place of an overflow is one question, its cause another: a value that is too large for its dtype may come from one
sample, from a training that diverged, or from the dtype alone. Trials that the rank has made after its alarm decide
where they can; else the batches before and the other ranks support one of them. Where neither does, there is no cause.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...core.codes import Certainty
from ...core.events.alarm_evidence import EVERYTHING, NOTHING, CauseTrial
from ...core.frames import FramePhase, module_text
from ..facts.diagnosis import LocalDiagnosis, number_text
from ..report.verdict import OverflowCause
from .backward_cause import cause_in_derivative, cause_of_backward, cause_of_loose, cause_of_loss, cause_of_scale
from .cause_clues import CauseClues
from .data_cause import of_bad_input, of_batch, of_input, of_one_row, of_samples
from .derivative_rules import INSIDE
from .operation_cause import KEEP_OPEN, of_closed_rows, of_domain, of_precision, of_range
from .operation_rules import is_large_in_float64, outside_domain, trial_in
from .training_cause import growing, of_copy, of_earlier_copy, of_growth, of_start, of_training

_E, _S = Certainty.ESTABLISHED, Certainty.SUPPORTED


def cause_of(clues: CauseClues) -> OverflowCause | None:
    """The cause of what a diagnosis has found; None if it is not known."""
    first = clues.first
    if clues.odd is not None:
        return of_copy(clues.odd)
    if first.phase == FramePhase.INPUT:
        return of_input(clues)
    domain = outside_domain(clues.operation) if clues.operation is not None else ""
    is_of_mask = bool(first.mask.text) or first.mask.turned is not None
    # -inf that an operation made is not a mask's; but a mask may be the log of what is open, in part
    is_mask_made = bool(first.mask.text) and clues.operation is not None and clues.operation.element != EVERYTHING
    if clues.operation is not None and domain and is_of_mask and not is_mask_made:
        return of_domain(clues, clues.operation, domain)
    if is_of_mask:
        return _of_mask(first)
    if first.phase == FramePhase.BACKWARD:
        return _of_backward(clues, domain)
    if first.phase == FramePhase.LOSS:
        return _of_loss(clues, domain)
    if first.phase in (FramePhase.WEIGHT, FramePhase.OPTIMIZER):
        return of_growth(clues) or cause_of_loose(clues.facts, first)
    if first.bad_buffers and (first.is_origin or first.phase == FramePhase.BUFFER):
        return of_one_row(clues)
    if not first.is_origin or first.phase != FramePhase.FORWARD or first.weight.others_changed:
        return None
    return _of_forward(clues)


def _of_loss(clues: CauseClues, domain: str) -> OverflowCause | None:
    operation = clues.operation
    if operation is not None and domain and not is_large_in_float64(operation):
        return of_domain(clues, operation, domain)
    large = of_earlier_copy(clues) or of_growth(clues) or cause_of_scale(clues.facts, clues.first)
    if operation is None:
        return large or cause_of_loss(clues.facts, clues.first)
    large = of_closed_rows(operation) or large or of_precision(operation)
    return large or (of_domain(clues, operation, domain) if domain else of_range(operation))


def _of_backward(clues: CauseClues, domain: str) -> OverflowCause | None:
    operation = clues.operation
    general = of_growth(clues) or of_bad_input(clues)
    if operation is None or not operation.trials:  # a batch of --explain N makes none
        return general or cause_of_backward(clues.facts, clues.first)
    known = cause_in_derivative(operation) if operation.node else None
    if known is not None:
        return known
    if not domain:
        precision = of_precision(operation) if operation.node else None
        # a gradient may be too large for another reason, such as a loss that has grown
        return general or (replace(precision, certainty=_S) if precision is not None else None)
    found = of_domain(clues, operation, domain)
    if operation.node:
        return found
    hidden = [f"{step.removesuffix('.')}{INSIDE}." for step in found.next]  # the forward made it, and did not show it
    return replace(found, next=hidden)


def _of_mask(first: LocalDiagnosis) -> OverflowCause:
    mask = first.mask
    turned = f"{module_text(*mask.turned)} turned an expected -inf into nan" if mask.turned is not None else ""
    return OverflowCause(
        "mask",
        _E if mask.text and first.sure else _S,
        mask.text or turned,
        [KEEP_OPEN],
    )


def _of_forward(clues: CauseClues) -> OverflowCause | None:
    ran, operation = clues.ran, clues.operation
    again = trial_in(ran.trials if ran is not None else [], NOTHING)
    if again is not None and again.value == "finite":
        return _unrepeatable("forward", [again])
    if operation is None:
        return of_earlier_copy(clues) or of_growth(clues)
    alone = trial_in(operation.trials, NOTHING)
    if alone is not None and alone.value == "finite":
        return _unrepeatable(operation.op, [alone])
    closed = of_closed_rows(operation)
    if closed is not None:
        return closed
    domain = outside_domain(operation)
    if domain and not is_large_in_float64(operation):
        return of_domain(clues, operation, domain)
    # the result is too large a number: its operands are
    large = of_earlier_copy(clues) or of_training(clues) or of_samples(clues, operation) or of_start(clues)
    large = large or growing(clues, of_precision(operation))
    if large is not None:
        return large
    return of_domain(clues, operation, domain) if domain else of_batch(clues) or of_range(operation)


def _unrepeatable(what: str, trials: list[CauseTrial]) -> OverflowCause:
    ran = "the same forward" if what == "forward" else f"the same {what}"
    return OverflowCause(
        "unrepeatable",
        _S,
        f"{ran} with the same inputs was finite the second time (abs max {number_text(trials[0].abs_max)})",
        [
            "Look for what is not the same in a second call: a counter or a cache that the module keeps, memory that "
            "nothing has written (torch.empty), two streams that use one tensor. If there is none, test that GPU or "
            "host: gpuwatch check."
        ],
        trials,
    )
