"""The cause that the data is: samples of a batch, a whole batch, or what the model was handed."""

from __future__ import annotations

import math

from ...core.codes import Certainty
from ...core.events.alarm_evidence import NOTHING, SAMPLES, BadOperation, BatchInputs
from ...core.frames import Frame, FramePhase, Row
from ...core.roles import RoleKind
from ...core.values import NonFinite, name_of
from ..facts.diagnosis import number_text
from ..facts.replicas import page_of, peers
from ..report.verdict import OverflowCause
from .cause_clues import CauseClues, odd_text, origin_text, samples_text, source_of, source_of_rows
from .operation_cause import of_precision
from .operation_rules import domain_advice, trial_in

_E, _S = Certainty.ESTABLISHED, Certainty.SUPPORTED
LOOK_AT_LOADER = "Look at the data loader of this rank, or at the code that makes the model's inputs."
_PAGES_BEFORE = 8
_OUT_OF_LINE = 30.0
"""How much larger than on all other ranks what a model is handed must be."""


def of_samples(clues: CauseClues, operation: BadOperation) -> OverflowCause | None:
    """Samples that are far larger than all others, and without which the same forward is finite.

    None if the batches before had as large ones. The forward as it was, run last, must have made the value again.
    """
    ran = clues.ran
    odd, trials = (ran.samples, ran.trials) if ran is not None else (None, [])
    tried = trial_in(trials, SAMPLES)
    if odd is None or odd.how != "large" or tried is None or tried.value != "finite":
        return None
    again = trials[-1]
    is_made_again = again.changed == NOTHING and again.value not in ("", "finite")
    if not is_made_again or (odd.before or 0.0) * _OUT_OF_LINE > odd.abs_max:
        return None
    it, which = "it" if len(odd.indices) == 1 else "them", samples_text(odd, source_of(clues, odd))
    also, advice = of_precision(operation), domain_advice(operation)
    earlier = f", and at most {number_text(odd.before)} in the batches before" if odd.before is not None else ""
    finite = f"tried: with {it} replaced by another of the batch, the same forward is finite"
    return OverflowCause(
        "data",
        _E if odd.before is not None else _S,
        f"{odd_text(clues, odd)}{earlier}; {finite} (abs max {number_text(tried.abs_max)})",
        [
            f"Look at {which} of that batch: leave {it} out, or clip or normalise what the data set "
            f"returns. Leaving {it} out was tried (see the cause); clipping was not.",
            *(
                f"Or: {step[0].lower()}{step[1:]}"
                for step in [*(also.next if also is not None else []), *filter(None, [advice])]
            ),
        ],
        [tried, again, *(also.trials if also is not None else [])],
        odd,
    )


def _handed_roots(clues: CauseClues) -> list[tuple[str, float, float]]:
    """(role, abs max on this rank, the largest on the others) of what the model was handed in that batch."""
    theirs = [other for other in peers(clues.facts, clues.first).values() if other.batch == clues.first.batch]
    others = [_root_inputs(other.frames) for other in theirs]
    return [
        (role, size, max(known))
        for role, size in handed_root(clues).items()
        if (known := [sizes[role] for sizes in others if role in sizes])
    ]


def handed_root(clues: CauseClues) -> dict[str, float]:
    """abs max, by role, of what the model was handed in the batch of the diagnosis."""
    page = page_of(clues.facts, clues.first)
    return _root_inputs(page.frames) if page is not None else {}


def _root_inputs(frames: list[Frame]) -> dict[str, float]:
    """abs max of what the root was handed."""
    return {row.role: row.abs_max for row in _root_rows(frames) if row.abs_max and row.finite}


def _root_rows(frames: list[Frame]) -> list[Row]:
    """What the root was handed. The module that is called first is handed the same where it has no frame."""
    forward = [frame for frame in frames if frame.phase == FramePhase.FORWARD]
    root = next((frame for frame in forward if not frame.module), None) or next(iter(forward), None)
    rows = root.rows if root is not None else []
    return [row for row in rows if row.role_kind is RoleKind.INPUT]


def of_batch(clues: CauseClues) -> OverflowCause | None:
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


def of_one_row(clues: CauseClues) -> OverflowCause | None:
    """A running variance that is nan since its module was handed one number a channel: one has no unbiased variance.

    None if that was not its last finite call, or if a call before was handed one, too. Channels are dim 1.
    """
    first = clues.first
    buffer = next((name for name in first.bad_buffers if "var" in name.partition(" of ")[0]), "")
    pages = clues.facts.one(first.attempt, first.rank).pages.values() if buffer and first.row.value == "nan" else ()
    calls = [
        (page.batch, row.shape, all(each.finite for each in frame.outputs))
        for page in sorted(pages, key=lambda page: -page.number)[:_PAGES_BEFORE]
        if page.root == first.root
        for frame in reversed(page.frames)
        if (frame.module, frame.cls, frame.phase) == (first.module, first.cls, FramePhase.FORWARD)
        for row in frame.rows
        if row.role == "input[0]" and row.shape is not None and len(row.shape) > 1
    ]
    finite = [(batch, shape) for batch, shape, is_finite in calls if is_finite]
    single = [math.prod(shape) == shape[1] for _, shape in finite]
    if len(finite) < 2 or not single[0] or any(single[1:]):
        return None
    (batch, shape), (_, before), *_ = finite
    return OverflowCause(
        "data",
        _S,
        f"in batch {batch} of rank {first.rank} the module had one number a channel: input[0] was {list(shape)}, and "
        f"{list(before)} in the call before; the unbiased variance of one number is nan, and {buffer} keeps it",
        [
            "Leave out a batch of one (drop_last=True), or compute the variance with correction=0 (unbiased=False). "
            "Not tried."
        ],
    )


def of_bad_input(clues: CauseClues) -> OverflowCause | None:
    """What the model was handed held nan or +inf, and only a gradient shows it: a gate or a tanh has bounded it.

    Of an -inf nobody can say whether it is a mask.
    """
    first, page = clues.first, page_of(clues.facts, clues.first)
    rows = _root_rows(page.frames) if page is not None and not first.passage.passed else []
    bad = next((row for row in rows if not row.finite and not row.only_neginf), None)
    if bad is None:
        return None
    value = name_of(NonFinite(bad.flags))
    return OverflowCause(
        "data",
        _S,
        f"the batch itself: {bad.role} of the model holds {value}, which its forward has bounded",
        [LOOK_AT_LOADER],
    )


def of_input(clues: CauseClues) -> OverflowCause | None:
    """What the model was handed was not finite."""
    first = clues.first
    if first.passage.passed:
        return None
    rank = clues.facts.one(first.attempt, first.rank)
    inputs = next((each for each in rank.batch_inputs if each.where.batch == first.batch), None)
    patterns = inputs.bad if inputs is not None else {}
    origin = _origin_of_bad_rows(clues, inputs)
    others = [other for other in peers(clues.facts, first).values() if other.batch == first.batch]
    finite = "; the other ranks' were finite" if others and not any(other.may_hold_alarm for other in others) else ""
    pattern = f" ({patterns[first.role]})" if first.role in patterns else ""
    found = f"; that is {origin}" if origin else ""
    return OverflowCause(
        "data",
        _S,
        f"the batch itself: {first.role} holds {first.row.value}{pattern}{found}{finite}",
        [f"Look at {origin}, and at what the script makes of it." if origin else LOOK_AT_LOADER],
    )


def _origin_of_bad_rows(clues: CauseClues, inputs: BatchInputs | None) -> str:
    """The samples of the data set whose rows are bad; "" if that is not known."""
    role, page = clues.first.role, page_of(clues.facts, clues.first)
    bad = inputs.rows.get(role, []) if inputs is not None else []
    shape = next((row.shape for row in _root_rows(page.frames) if row.role == role), None) if page is not None else None
    source = source_of_rows(clues, shape[0]) if bad and shape else None
    return origin_text(source, bad) if source is not None else ""
