"""What to do next after an overflow, from the tensor that the evidence shows to be bad. Pure.

The advice of a known cause comes first; that is in collector/cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from ...core.events.alarm_evidence import BadOperation
from ...core.frames import FramePhase
from ...core.roles import RoleKind, is_param_group, parse_role
from ...core.text import joined
from ..cause.data_cause import LOOK_AT_LOADER
from ..facts.diagnosis import LocalDiagnosis, number_text
from ..facts.replicas import OddWeight, WildWeight, page_of, wild_weight
from ..facts.run_facts import RunFacts
from ..report.verdict import OverflowCause
from .overflow_words import is_of_no_module

_WHOLE_BATCHES = "To see whole batches: gpuwatch launch --trace-batches"
_GO_ON = "; to keep training past it: --on-overflow continue"
_NO_STEP = "No optimizer step was seen before it: "
_FLOAT16 = (
    "float16 holds at most 65504: compute this part in bfloat16, or in float32 under torch.autocast(enabled=False)."
)
_LARGE = 100.0
_SHOWN = (FramePhase.FORWARD, FramePhase.BACKWARD)


@dataclass(frozen=True)
class AdviceClues:
    """Evidence beside a diagnosis that decides what to inspect first."""

    wild: WildWeight | None = None
    large: str = ""
    """The largest weight of a model that has not been trained yet, if it is very large."""
    gradients: bool = False
    """Gradients were read in that batch."""
    weights: bool = False
    went_on: bool = False
    """The script has ended well after it."""
    cause: OverflowCause | None = None
    operation: BadOperation | None = None
    """The one that made it."""


def clues_of(
    facts: RunFacts,
    first: LocalDiagnosis,
    odd: OddWeight | None = None,
    large: str = "",
) -> AdviceClues:
    """The clues of a diagnosis. `odd` is a copy of a weight that differs."""
    page = page_of(facts, first)
    frames = page.frames if page is not None else []
    from_outside = first.source == "outside" and first.phase == FramePhase.BACKWARD
    ended = facts.one(first.attempt, first.rank).script_exit
    may_be_wild = odd is None and first.row.phase in _SHOWN and (first.is_origin or from_outside)
    return AdviceClues(
        wild=wild_weight(facts, first) if may_be_wild else None,
        large=large,
        gradients=any(frame.gradients for frame in frames),
        weights=any(frame.weights for frame in frames),
        went_on=ended is not None and ended.code == 0,
    )


def wild_line(wild: WildWeight) -> str:
    """The line of evidence about a wild weight."""
    return f"first unusual value: {wild.name}, abs max {number_text(wild.row.abs_max)}, against {wild.against}"


def next_steps(first: LocalDiagnosis, clues: AdviceClues | None = None) -> list[str]:
    """What to do next: the cause's own advice, where cause/ has found one; else what the evidence points at; else what
    goes with the way in which the value came there (`LocalDiagnosis.source`)."""
    clues = clues or AdviceClues()
    known = clues.cause.next if clues.cause is not None else []
    steps = known or _of_clues(first, clues) or list(filter(None, [_by_source(first, clues)]))
    if (
        not known
        and first.row.dtype == "float16"
        and first.source in ("made", "reduced")
        and first.phase != FramePhase.OPTIMIZER
    ):
        steps = [_FLOAT16, *steps]
    numbers = ",".join(str(batch) for batch in (first.batch - 1, first.batch) if batch >= 0)
    whole = f"{_WHOLE_BATCHES} {numbers}{'' if clues.went_on else _GO_ON}."
    return steps if first.source == "skipped" else [*steps, whole]


def _of_clues(first: LocalDiagnosis, clues: AdviceClues) -> list[str]:
    if clues.wild is not None:
        large = f"{clues.wild.name} so large, {number_text(clues.wild.row.abs_max)} against {clues.wild.against}"
        return [
            f"Look first for what made the {large}: the script, or a step with a large gradient. The overflow follows "
            "from it."
        ]
    if first.bad_buffers and first.is_origin:
        return [f"Look at what fills {first.bad_buffers[0]}: torch.empty, a checkpoint, a running average of nan."]
    if first.source == "changed" or first.weight.changed_since or (first.weight.others_changed and first.is_origin):
        when = "between backward() and step()" if first.source == "changed" else "between two steps"
        own = "an update of its own or a compiled step, " if first.weight.changed_since and first.step == 0 else ""
        return [
            f"Look at what the script does with weights {when}: {own}an average, a clamp, a copy, a load. If it "
            "does none of these, check the memory of that GPU or host (nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg)."
        ]
    return []


_OF_SOURCE = {
    "skipped": "Run it again with --every 1 (or --explain N for batch N alone) to find the module.",
    "received": "Look at what the ranks that send to this one, or share a collective with it, computed just before: it "
    "was made on one of them.",
    "reduced": "Divide gradients before they are summed, or reduce them in float32 or bfloat16.",
    "buffer": "Look at what fills that buffer: to_empty() or torch.empty with nothing after it, a checkpoint, a "
    "running average of nan.",
    "left": "Call zero_grad() before that backward. What made the gradient ran before: have that watched, too (a cell "
    "of a notebook, a step that was left out).",
}


def _by_source(first: LocalDiagnosis, clues: AdviceClues) -> str:
    """The advice; "" if there is none."""
    if first.source in _OF_SOURCE:
        return _OF_SOURCE[first.source]
    if is_of_no_module(first):
        return "Look at the code of the script that computed this tensor, outside of its modules."
    if first.source == "unread":
        if clues.weights:
            return "Look at that module's weights when it is called: in that batch they were not read."
        return "Watch the weights, too: --watch forward,grads,weights."
    if first.source == "carried":
        if first.from_page:
            return "Watch what runs before that module, too: omit --modules, or let it match more modules."
        return "Look at the inputs of that module: the frames of what ran before it in that batch were not received."
    if first.phase == FramePhase.INPUT:
        if first.passage.passed:
            before = "Look at what this rank receives, and at what it calls before that model."
            return f"{before} If that is finite, look at its data loader."
        return LOOK_AT_LOADER
    if first.phase == FramePhase.LOSS:
        if clues.operation is not None:
            return _step_for_operands(clues.operation)
        return "Look at the code of the script that computes the loss from what the model returns."
    if first.phase == FramePhase.BACKWARD:
        known = clues.operation if not first.cause else None
        return _step_for_operands(known) if known is not None else _step_for_backward(first)
    if first.phase == FramePhase.OPTIMIZER:
        return _step_for_optimizer(first)
    if first.source == "weight":
        return _step_for_weight(first, clues)
    if first.step == 0 and first.phase == FramePhase.FORWARD:
        weights = f"the {clues.large}" if clues.large else "the weights"
        scale = "" if clues.large else ", and at the scale of the inputs"
        return _NO_STEP + f"look at the initialisation of {weights}, or at the checkpoint{scale}."
    if clues.operation is not None:
        return _step_for_operands(clues.operation)
    before = (
        "Look at abs max in the batches before it: growth over many means a learning rate that is too high, a jump "
        "means the data of this one."
    )
    return before if first.from_page else ""


def _step_for_operands(operation: BadOperation) -> str:
    """What is known of an operation that made it, where the cause is not."""
    sizes = [number_text(each.abs_max) for each in operation.inputs if each.abs_max is not None]
    at = f" at {PurePath(operation.file).name}:{operation.line}" if operation.file else ""
    are_large = max((each.abs_max or 0.0 for each in operation.inputs), default=0.0) > _LARGE
    large = " so large" if are_large else ""
    return f"Look at what makes the operands of `{operation.name}`{at}{large}: abs max {joined(sizes or ['unknown'])}."


def _step_for_optimizer(first: LocalDiagnosis) -> str:
    if parse_role(first.role).kind is RoleKind.STATE:
        return (
            "Keep the optimizer's state in float32, or scale the gradients down: a square of a gradient overflows, and "
            "a weight whose exp_avg_sq is inf is never updated again."
        )
    state = any(note.startswith("the optimizer's ") for note in first.notes)
    also = ", and at the optimizer's state: its extremes are in the evidence" if state else ""
    return f"Look at the learning rate and eps of this parameter's group{also}."


def _step_for_weight(first: LocalDiagnosis, clues: AdviceClues) -> str:
    if first.weight.computed:
        return "Check the code that computes this weight, and its inputs."
    if first.row.phase == FramePhase.OPTIMIZER:
        if is_param_group(first.module) and first.weight.history:
            return "Look at what the script computes between that tensor and the loss."
        if clues.gradients:
            return "Look at what else changes that weight: that batch shows no gradient of it, but shows others."
        return "Watch the gradients, too: --watch forward,grads,weights."
    if first.step == 0:
        return _NO_STEP + "look at how that weight is initialised (torch.empty?), or at the checkpoint."
    return (
        "The record does not show what changed it: look at the gradients and the learning rate of the steps before, "
        "and at what the script does with that weight: a copy, an average, a load."
    )


def _step_for_backward(first: LocalDiagnosis) -> str:
    if first.cause:
        return "No scale helps against a gradient that is never finite: look at that module's backward, not the scaler."
    if first.source == "outside" and first.passage.passed:
        others = "what the script does with the model's output, another model, another rank"
        return f"Look at where that gradient comes from: {others}."
    if first.source == "outside":
        return "Look at the loss: its derivative at that output is not finite (log, sqrt or a division at 0)."
    if first.row.value == "nan":
        clamp = "clamp its input: torch.where around it keeps the forward finite, not the backward"
        return f"Look for a derivative that is not finite at 0 (sqrt, norm, log, division), and {clamp}."
    return "Scale the loss down (GradScaler), or compute this part in bfloat16 or float32."
