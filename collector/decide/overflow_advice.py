"""What to do next after an overflow. Advice follows from the evidence: what that shows to be bad is looked at first."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.frames import FramePhase, format_number, module_text
from ...core.roles import RoleKind, parse_role
from ..facts.diagnosis import LocalDiagnosis
from ..facts.facts import RunFacts
from .replicas import OddWeight, WildWeight, page_of, wild_weight

_WHOLE_BATCHES = (
    "To see whole batches: gpuwatch launch --trace-batches N,N; to train on past it: --on-overflow continue."
)
_NO_STEP = "No optimizer step has run yet: "
_FLOAT16 = "float16 ends at 65504: compute this part in bfloat16, or in float32 under torch.autocast(enabled=False)."
_SHOWN = (FramePhase.FORWARD, FramePhase.BACKWARD)


@dataclass(frozen=True)
class AdviceClues:
    """What is known beside a diagnosis that decides what to look at."""

    odd: OddWeight | None = None
    """A copy of a weight that is blamed."""
    wild: WildWeight | None = None
    large: str = ""
    """The largest weight of a model that has not been trained yet, if it is very large."""
    gradients: bool = False
    """Gradients were looked at in that batch."""
    weights: bool = False


def clues_of(
    facts: RunFacts,
    first: LocalDiagnosis,
    odd: OddWeight | None = None,
    blamed: OddWeight | None = None,
    large: str = "",
) -> AdviceClues:
    """The clues of a diagnosis. `odd` is a copy of a weight that differs, and `blamed` the same if it explains it."""
    page = page_of(facts, first)
    frames = page.frames if page is not None else []
    from_outside = first.source == "outside" and first.phase == FramePhase.BACKWARD
    may_be_wild = odd is None and first.seen_in in _SHOWN and (first.is_origin or from_outside)
    return AdviceClues(
        odd=blamed,
        wild=wild_weight(facts, first) if may_be_wild else None,
        large=large,
        gradients=any(frame.gradients for frame in frames),
        weights=any(frame.weights for frame in frames),
    )


def wild_line(wild: WildWeight) -> str:
    """What the evidence says of a wild weight."""
    return f"first wild number: {_named(wild)}, abs max {_size(wild)}, against {wild.against}"


def _named(wild: WildWeight) -> str:
    return f"{wild.row.role} of {module_text(wild.frame.module, wild.frame.cls)}"


def _size(wild: WildWeight) -> str:
    return format_number(wild.row.abs_max).strip()


def next_steps(first: LocalDiagnosis, clues: AdviceClues | None = None) -> list[str]:
    """Short advice on what to look at."""
    clues = clues or AdviceClues()
    steps = _of_clues(first, clues) or _by_source(first, clues)
    if first.dtype == "float16" and first.source in ("made", "reduced") and first.phase != FramePhase.OPTIMIZER:
        steps = [_FLOAT16, *steps]
    return steps if first.source == "skipped" else [*steps, _WHOLE_BATCHES]


def _of_clues(first: LocalDiagnosis, clues: AdviceClues) -> list[str]:
    if clues.odd is not None:
        return _of_odd(clues.odd)
    if clues.wild is not None:
        return [
            f"Look first at what has made the {_named(clues.wild)} so large, {_size(clues.wild)} against "
            f"{clues.wild.against}: the script, or a step with a large gradient. The overflow follows from it."
        ]
    if first.bad_buffers and first.is_origin:
        return [f"Look at what fills {first.bad_buffers[0]}: torch.empty, a checkpoint, a running average of nan."]
    if first.source == "changed" or first.changed_since or (first.changed and first.is_origin):
        when = "between backward() and step()" if first.source == "changed" else "between two steps"
        own = "an update of its own or a compiled step, " if first.changed_since and first.step == 0 else ""
        return [
            f"Look at what the script does with weights {when}: {own}an average, a clamp, a copy, a load. If nothing "
            "does, check the memory of that GPU or host (nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg)."
        ]
    return []


def _of_odd(odd: OddWeight) -> list[str]:
    memory = (
        "the node's memory checks (nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg for Xid or machine checks), "
        "and leave it out of the next run if it happens again."
    )
    if odd.agreed_in is not None and odd.untrained:
        return [f"If no code of the script changes that weight on this rank alone, run {memory}"]
    if odd.agreed_in is not None:
        return [
            "Look at what trains or changes that weight on this rank alone: a gradient that is not reduced, a "
            "learning rate, a copy."
        ]
    return [
        "Look whether every rank starts from the same seed and checkpoint; --trace-batches 0,N shows since when "
        "they differ.",
        *([f"If they started alike, run {memory}"] if odd.untrained else []),
    ]


def _by_source(first: LocalDiagnosis, clues: AdviceClues) -> list[str]:
    if first.source == "skipped":
        return ["Run it again with --every 1 (or --trace-batches with that batch) to have the module named."]
    if first.source == "received":
        return [
            "Look at what the ranks that send to this one, or share a collective with it, computed just before: it was "
            "made on one of them."
        ]
    if first.source == "reduced":
        return ["Divide gradients before they are summed, or reduce them in float32 or bfloat16."]
    if first.turned is not None:
        return [
            "A row of the mask that is -inf everywhere makes softmax nan: keep one position open, or use torch.where."
        ]
    if first.source == "unread":
        if clues.weights:
            return ["Look at that module's weights when it is called: in that batch they were not read."]
        return ["Watch the weights, too: --watch forward,grads,weights."]
    if first.source == "carried":
        if first.from_page:
            return ["Watch what runs before that module, too: leave --modules out, or let it match more."]
        return ["Look at what is handed to that module: what ran before it in that batch was not received."]
    if first.source == "left":
        return [
            "Call zero_grad() before that backward. What made the gradient ran before: have that watched, too (a cell "
            "of a notebook, a step that was left out)."
        ]
    if first.phase == FramePhase.INPUT:
        return [_of_input(first)]
    if first.phase == FramePhase.BACKWARD:
        return [_of_backward(first)]
    if first.phase == FramePhase.OPTIMIZER and parse_role(first.role).kind is RoleKind.STATE:
        return [
            "Keep the optimizer's state in float32, or scale the gradients down: a square of a gradient overflows, and "
            "a weight whose exp_avg_sq is inf is never changed again."
        ]
    if first.phase == FramePhase.OPTIMIZER:
        state = any(note.startswith("the optimizer's ") for note in first.notes)
        also = ", and at the optimizer's state, of which the evidence has the extremes" if state else ""
        return [f"Look at the learning rate and eps of this parameter's group{also}."]
    if first.source == "weight":
        return [_of_weight(first, clues)]
    if first.step == 0 and first.phase == FramePhase.FORWARD:
        what = f"the {clues.large}" if clues.large else "the weights, and at the scale of the inputs"
        return [_NO_STEP + f"look at the initialisation of {what}."]
    if not first.from_page:
        return []
    return ["Look at abs max in the frames before it: growth over many batches means a learning rate that is too high."]


def _of_input(first: LocalDiagnosis) -> str:
    if first.passed:
        return (
            "Look at what this rank receives, and at what it calls before that model. If that is finite, look at its "
            "data loader."
        )
    return "Look at the data loader of this rank, or at the code that makes what the model is handed."


def _of_weight(first: LocalDiagnosis, clues: AdviceClues) -> str:
    if first.computed:
        return "Look at the code that computes that weight, and at what it is computed of."
    if first.seen_in == FramePhase.OPTIMIZER:
        if clues.gradients:
            return "Look at what else changes that weight: no gradient of it was seen in that batch, others were."
        return "Watch the gradients, too: --watch forward,grads,weights."
    if first.step == 0:
        return _NO_STEP + "look at how that weight is initialised (torch.empty?), or at the checkpoint."
    return (
        "What changed it was not seen: look at the gradients and the learning rate of the steps before, and at what "
        "the script does with that weight: a copy, an average, a load."
    )


def _of_backward(first: LocalDiagnosis) -> str:
    if first.cause:
        return "No scale helps against a gradient that is never finite: look at that module's backward, not the scaler."
    if first.source == "outside" and first.passed:
        return (
            "Look at where that gradient comes from: what the script does with the model's output, another model, "
            "another rank."
        )
    if first.source == "outside":
        return "Look at the loss: its derivative at that output is not finite (log, sqrt or a division at 0)."
    if first.value == "nan":
        return (
            "Look for a derivative that is not finite at 0 (sqrt, norm, log, division), and clamp its input: "
            "torch.where around it keeps the forward finite, not the backward."
        )
    return "Scale the loss down (GradScaler), or compute this part in bfloat16 or float32."
