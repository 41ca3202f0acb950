"""Why a non-finite value was made: its cause, and what to do about it. Pure.

The place of an overflow is one question, its cause another: a value that is too large for its dtype may come from one
sample, from a training that diverged, or from the dtype alone. Trials that the rank has made after its alarm decide
where they can; else the batches before and the other ranks support one of them. Where neither does, there is no cause.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.events import NOTHING, SAMPLES, BadOperation, CauseTrial, OddSamples, SecondRun
from ...core.frames import Frame, FramePhase, module_text
from ...core.roles import RoleKind
from ...core.values import DTYPE_MAX
from ...core.verdicts import Certainty
from ..facts.diagnosis import LocalDiagnosis, number_text
from ..facts.facts import RunFacts
from ..report.model import OverflowCause
from ..report.sentence_parts import ranks_text
from .backward_cause import cause_of_backward
from .growth import ModuleGrowth, growth_of
from .operation_rules import domain_advice, is_large_in_float64, outside_domain, trial_in
from .replicas import OddWeight, WildWeight, page_of, peers

_E, _S = Certainty.ESTABLISHED, Certainty.SUPPORTED
_OUT_OF_LINE = 30.0
"""How much larger than on all other ranks what a model is handed must be."""
_DIVERGED = 2
"""Batches in a row in which outputs grow, for a training that diverges. One alone is one step."""
_OF_16_BITS = ("float16", "bfloat16")
_OF_ROWS = ("softmax", "log_softmax", "logsumexp", "safe_softmax")
_OPEN = "A row of the mask that is -inf everywhere makes softmax nan: keep one position open, or use torch.where."


@dataclass(frozen=True)
class CauseClues:
    """What is known beside the diagnosis."""

    facts: RunFacts
    first: LocalDiagnosis
    odd: OddWeight | None = None
    """A copy of a weight that differs, and is blamed."""
    wild: WildWeight | None = None
    large: tuple[str, str] | None = None
    """(place, abs max) of the largest weight of a model that has not been trained yet, if it is very large."""
    ran: SecondRun | None = None
    operation: BadOperation | None = None
    """The one that made the value."""


def cause_of(clues: CauseClues) -> OverflowCause | None:
    """The cause of what a diagnosis has found; None if it is not known."""
    first = clues.first
    if clues.odd is not None:
        return _of_copy(clues.odd)
    if first.phase == FramePhase.INPUT:
        return _of_input(clues)
    domain = outside_domain(clues.operation) if clues.operation is not None else ""
    if clues.operation is not None and domain and first.turned is not None and not first.mask:
        return _of_domain(clues, clues.operation, domain)  # -inf that an operation made is not a mask's
    if first.mask or first.turned is not None:
        return _of_mask(first)
    if first.phase == FramePhase.BACKWARD:
        return cause_of_backward(clues.facts, first)
    if not first.is_origin or first.phase != FramePhase.FORWARD or first.bad_buffers or first.changed:
        return None
    return _of_forward(clues)


def _of_copy(odd: OddWeight) -> OverflowCause:
    mine = "is not finite" if not odd.row.finite else f"has abs max {number_text(odd.row.abs_max)}"
    theirs = f"abs max {number_text(odd.others.abs_max)}"
    statement = f"{odd.row.role} of this rank's copy {mine}, that of {ranks_text(odd.ranks)} has {theirs}"
    return OverflowCause("replica", _E, statement, _steps_for_copy(odd))


def _steps_for_copy(odd: OddWeight) -> list[str]:
    memory = (
        "the node's memory checks (nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg for Xid or machine checks), "
        "and leave it out of the next run if it happens again."
    )
    if odd.agreed_in is not None and odd.untrained:
        return [f"If no code of the script changes that weight on this rank alone, run {memory}"]
    if odd.agreed_in is not None:
        alone = "a gradient that is not reduced, a learning rate, a copy"
        return [f"Look at what trains or changes that weight on this rank alone: {alone}."]
    start = "Check whether every rank starts from the same seed and checkpoint"
    return [
        f"{start}; --trace-batches 0,1 shows whether they began alike.",
        *([f"If they started equal, run {memory}"] if odd.untrained else []),
    ]


def _of_mask(first: LocalDiagnosis) -> OverflowCause:
    turned = f"{module_text(*first.turned)} turned an expected -inf into nan" if first.turned is not None else ""
    return OverflowCause(
        "mask",
        _E if first.mask else _S,
        first.mask or turned,
        [_OPEN],
    )


def _of_forward(clues: CauseClues) -> OverflowCause | None:
    ran, operation = clues.ran, clues.operation
    again = _trial(ran.trials if ran is not None else [], NOTHING)
    if again is not None and again.value == "finite":
        return _unrepeatable("forward", [again])
    if operation is None:
        return None
    alone = trial_in(operation, NOTHING)
    if alone is not None and alone.value == "finite":
        return _unrepeatable(operation.op, [alone])
    if _is_of_closed_rows(operation):
        return _of_closed_rows(operation)
    domain = outside_domain(operation)
    if domain and not is_large_in_float64(operation):
        return _of_domain(clues, operation, domain)
    # the result is too large a number: its operands are
    large = _of_samples(clues, operation) or _of_training(clues) or _of_start(clues) or _of_batch(clues)
    if large is not None:
        return large
    if domain:
        return _of_domain(clues, operation, domain)
    return _of_precision(clues, operation)


def _is_of_closed_rows(operation: BadOperation) -> bool:
    """Whether a softmax made nan of -inf alone: the maximum of a row is subtracted from it, and that was -inf."""
    handed = {each.value for each in operation.inputs} - {"finite", ""}
    return operation.output.value == "nan" and handed == {"-inf"} and _name(operation).strip("`") in _OF_ROWS


def _of_closed_rows(operation: BadOperation) -> OverflowCause:
    return OverflowCause(
        "mask",
        _E,
        f"{_name(operation)} was handed rows that are -inf throughout, and made nan of them: {operation.element}",
        [_OPEN],
    )


def _trial(trials: list[CauseTrial], changed: str) -> CauseTrial | None:
    return next((each for each in trials if each.changed == changed and each.value), None)


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


# -- of samples ------------------------------------------------------------------------------------------------------


def _samples_text(odd: OddSamples) -> str:
    """`sample 6 of 8`, `samples 1, 2 and 5 of 64`"""
    *rest, last = map(str, odd.indices[:8])
    listed = f"{', '.join(rest)} and {last}" if rest else last
    more = f" and {len(odd.indices) - 8} more" if len(odd.indices) > 8 else ""
    return f"sample{'s' if rest else ''} {listed}{more} of {odd.size}"


def _odd_text(odd: OddSamples, rank: int) -> str:
    where = f"in {odd.role} of `{odd.module}`" if odd.module else f"in {odd.role} of the model"
    one = len(odd.indices) == 1
    how = {
        "large": f"{'has' if one else 'have'} abs max {number_text(odd.abs_max)}",
        "zero": f"{'is' if one else 'are'} all zero",
        "constant": f"{'is' if one else 'are'} constant ({number_text(odd.abs_max)})",
    }[odd.how]
    others = f"the others at most {number_text(odd.highest)}"
    return f"{_samples_text(odd)} of this batch of rank {rank} {how} {where}, {others}"


def _of_samples(clues: CauseClues, operation: BadOperation) -> OverflowCause | None:
    """One sample is far larger than all others, and without it the same forward is finite."""
    ran = clues.ran
    odd = ran.samples if ran is not None else None
    tried = _trial(ran.trials if ran is not None else [], SAMPLES)
    if odd is None or odd.how != "large" or tried is None or tried.value != "finite":
        return None
    it = "it" if len(odd.indices) == 1 else "them"
    also, advice = _of_precision(clues, operation), domain_advice(operation)
    finite = f"tried: with {it} replaced by another sample of the batch, the same forward is finite"
    return OverflowCause(
        "data",
        _E,
        f"{_odd_text(odd, clues.first.rank)}; {finite} (abs max {number_text(tried.abs_max)})",
        [
            f"Look at {_samples_text(odd)} of that batch: leave {it} out, or clip or normalise what the data set "
            f"returns. Leaving {it} out was tried (see the cause); clipping was not.",
            *(
                f"Or: {step[0].lower()}{step[1:]}"
                for step in [*(also.next if also is not None else []), *filter(None, [advice])]
            ),
        ],
        [tried, *(also.trials if also is not None else [])],
        odd,
    )


# -- of the training ----------------------------------------------------------------------------------------------


def _of_training(clues: CauseClues) -> OverflowCause | None:
    """Outputs that ran away on all ranks alike, over several batches or with one step."""
    first = clues.first
    grown = growth_of(clues.facts, first)
    if grown is not None and grown.unlike and not grown.alike:
        grown = None
    if grown is not None and grown.steps >= _DIVERGED:
        return _diverged(clues, grown)
    if clues.wild is not None and clues.wild.against.rpartition(" in ")[2].startswith("batch"):
        wild = clues.wild
        return OverflowCause(
            "step",
            _S,
            f"{wild.name} has abs max {number_text(wild.row.abs_max)}, against {wild.against}: one step, or the "
            f"script, has made it large{_by_optimizer(clues)}",
            [
                f"Look at what made {wild.name} large: the gradient of the step before (clip_grad_norm_), "
                "the learning rate, a copy or a load by the script. None of these was tried."
            ],
        )
    if grown is not None and grown.alike and first.step > 0:
        return _one_step(clues, grown)
    return None


def _diverged(clues: CauseClues, grown: ModuleGrowth) -> OverflowCause:
    batches, sizes = grown.shown
    where = f"on {ranks_text(sorted([clues.first.rank, *grown.alike]))}"
    went = ", ".join(map(number_text, sizes))
    rate = _optimizer(clues)
    lower = f" ({rate[1]:g})" if rate is not None else ""
    return OverflowCause(
        "divergence",
        _S,
        f"the training diverged {where} from batch {grown.batches[1]} on: abs max of what "
        f"{module_text(grown.module, grown.cls)} returned went {went} in batches {batches[0]} to {batches[-1]}"
        f"{_by_optimizer(clues)}",
        [
            f"Lower the learning rate{lower}, warm it up, or clip the gradients (clip_grad_norm_); and look at what "
            f"changed in batch {grown.batches[1]}: a schedule, a checkpoint, an unfrozen part. None of these was tried."
        ],
    )


def _one_step(clues: CauseClues, grown: ModuleGrowth) -> OverflowCause:
    batches, sizes = grown.shown
    where = f"on {ranks_text(sorted([clues.first.rank, *grown.alike]))}"
    return OverflowCause(
        "step",
        _S,
        f"what {module_text(grown.module, grown.cls)} returned went from abs max {number_text(sizes[-2])} in batch "
        f"{batches[-2]} to {number_text(sizes[-1])} in batch {batches[-1]} {where} alike: one step has made its "
        f"weights large{_by_optimizer(clues)}",
        [
            f"Look at the step after batch {batches[-2]}: clip its gradients (clip_grad_norm_), or lower the learning "
            "rate. Neither was tried."
        ],
    )


def _optimizer(clues: CauseClues) -> tuple[str, float] | None:
    """(name, learning rate) of the last optimizer that stepped."""
    rank = clues.facts.one(clues.first.attempt, clues.first.rank)
    last = next((each.again.optimizer for each in rank.anomalies if each.again is not None), None)
    if last is None or "lr" not in last.settings:
        return None
    return last.cls.rpartition(".")[2], last.settings["lr"]


def _by_optimizer(clues: CauseClues) -> str:
    known = _optimizer(clues)
    return f", with {known[0]} at learning rate {known[1]:g}" if known is not None else ""


def _of_start(clues: CauseClues) -> OverflowCause | None:
    if clues.large is None or clues.first.step > 0:
        return None
    place, size = clues.large
    return OverflowCause(
        "start",
        _S,
        f"the {place} has abs max {size}, and no optimizer step has run yet",
        [f"Look at the initialisation of the {place}: torch.empty, to_empty(), a checkpoint. Not tried."],
    )


# -- of the batch ---------------------------------------------------------------------------------------------------


def _handed_roots(clues: CauseClues) -> list[tuple[str, float, float]]:
    """(role, abs max on this rank, the largest on the others) of what the model was handed in that batch."""
    page = page_of(clues.facts, clues.first)
    theirs = [other for other in peers(clues.facts, clues.first).values() if other.batch == clues.first.batch]
    if page is None or not theirs:
        return []
    mine = _root_inputs(page.frames)
    others = [_root_inputs(other.frames) for other in theirs]
    return [
        (role, size, max(known))
        for role, size in mine.items()
        if (known := [sizes[role] for sizes in others if role in sizes])
    ]


def _root_inputs(frames: list[Frame]) -> dict[str, float]:
    """abs max of what the root was handed. The module that is called first is handed the same where it has no frame."""
    forward = [frame for frame in frames if frame.phase == FramePhase.FORWARD]
    root = next((frame for frame in forward if not frame.module), None) or next(iter(forward), None)
    rows = root.rows if root is not None else []
    return {row.role: row.abs_max for row in rows if row.role_kind is RoleKind.INPUT and row.abs_max and row.finite}


def _of_batch(clues: CauseClues) -> OverflowCause | None:
    """What the model was handed is far larger than on all other ranks."""
    found = next((each for each in _handed_roots(clues) if each[1] > _OUT_OF_LINE * each[2] > 0), None)
    if found is None:
        return None
    role, size, others = found
    return OverflowCause(
        "data",
        _S,
        f"the model was handed {role} of abs max {number_text(size)} on rank {clues.first.rank}; on the other ranks it "
        f"was at most {number_text(others)} in that batch",
        [
            f"Look at batch {clues.first.batch} of rank {clues.first.rank}'s data, and at how it is normalised. Not "
            "tried: there was no other sample to put in its place."
        ],
    )


def _of_input(clues: CauseClues) -> OverflowCause | None:
    first = clues.first
    if first.passed:
        return None
    rank = clues.facts.one(first.attempt, first.rank)
    patterns = next((each.bad for each in rank.batch_inputs if each.where.batch == first.batch), {})
    others = [other for other in peers(clues.facts, first).values() if other.batch == first.batch]
    finite = "; the other ranks' were finite" if others and not any(other.may_hold_alarm for other in others) else ""
    pattern = f" ({patterns[first.role]})" if first.role in patterns else ""
    return OverflowCause(
        "data",
        _S,
        f"the batch itself: {first.role} held {first.value}{pattern} as the model was handed it{finite}",
        ["Look at the data loader of this rank, or at the code that makes the model's inputs."],
    )


# -- of the operation -------------------------------------------------------------------------------------------------


def _of_domain(clues: CauseClues, operation: BadOperation, words: str) -> OverflowCause:
    in_float64 = trial_in(operation, "float64")
    tried = ""
    if in_float64 is not None and in_float64.value != "finite":
        tried = f": no dtype mends that; tried: in float64 it is {in_float64.value}, too"
    first = ""
    if operation.handed:
        first = f" (first element: {', '.join(f'{number:.4g}' for number in operation.handed)} in)"
    odd = clues.ran.samples if clues.ran is not None else None
    sample = f"; {_odd_text(odd, clues.first.rank)}" if odd is not None and odd.how != "large" else ""
    advice = domain_advice(operation)
    return OverflowCause(
        "domain",
        _E if in_float64 is not None or operation.handed else _S,
        f"{_name(operation)} was asked for {words}{first}{tried}{sample}",
        [advice] if advice else [],
        [in_float64] if in_float64 is not None else [],
        odd if sample else None,
    )


def _name(operation: BadOperation) -> str:
    name = operation.op.removeprefix("aten.").partition(".")[0].strip("_")
    return f"the conversion to {operation.output.dtype}" if name == "to_copy" else f"`{name}`"


def _of_precision(clues: CauseClues, operation: BadOperation) -> OverflowCause | None:
    """The same operation on its own operands is finite in a dtype that reaches further."""
    dtype = operation.output.dtype
    tried = [each for name in ("bfloat16", "float32") if (each := trial_in(operation, name)) is not None]
    finite = [each for each in tried if each.value == "finite"]
    if dtype not in _OF_16_BITS or not finite:
        return None
    found = " and ".join(f"in {each.changed} abs max {number_text(each.abs_max)}" for each in finite)
    names = " or ".join(each.changed for each in finite)
    return OverflowCause(
        "precision",
        _E,
        f"what {_name(operation)} returns is too large for {dtype}, which holds at most {DTYPE_MAX[dtype]:g}; tried: "
        f"the same operation is finite {found}",
        [f"Compute this part in {names} (tried: finite), under torch.autocast(enabled=False) where autocast is on."],
        finite,
    )
