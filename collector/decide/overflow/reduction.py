"""A gradient that was finite when a rank's backward made it, and not when the optimizer got it.

If every rank's own gradient was finite, the sum over the ranks made it, and no rank is at fault. If the optimizers of
the other ranks got the same gradient finite, the code before this rank's step made it: clipping, unscaling.
"""

from __future__ import annotations

from ....core.frames import Row
from ...diagnose.local_diagnosis import LocalDiagnosis
from ...diagnose.step_origin import local_gradients
from ...facts.facts import RunFacts
from ...facts.kept_pages import KeptPage
from ..own_faults import doubts_about
from ..verdict_model import Verdict
from ..words import cascade_of, found_text, place_of, ranks_text
from .evidence import missing_ranks
from .replicas import page_of, peers
from .words import next_steps, overflow_at, whose


def of_reduced(facts: RunFacts, tier: list[LocalDiagnosis], diagnoses: list[LocalDiagnosis]) -> Verdict:
    """The verdict over gradients that were non-finite when the optimizers got them, from the pages of all ranks."""
    first = tier[0]
    ranks = facts.of_attempt(first.attempt)
    received = {first.rank: page_of(facts, first), **peers(facts, first)}
    pages = {rank.rank: received.get(rank.rank) for rank in ranks}
    local = {rank.rank: _own_finite(pages[rank.rank], first) for rank in ranks}
    unseen = [number for number, finite in local.items() if finite is not True]
    unseen_text = [f"{ranks_text(unseen)}: no finite gradient of its own was seen"] if unseen else []
    missing = missing_ranks(facts, first.attempt)
    fine = [number for number, page in pages.items() if _got_finite(page, first)]
    bad = [other for other in tier if (other.module, other.role) == (first.module, first.role)]
    if len(ranks) == 1 and not missing and local[first.rank]:
        return _own_step(facts, first, [f"rank {first.rank} is alone: nothing was reduced"])
    if len(bad) == 1 and fine and local[first.rank] and _agree(pages[first.rank], pages[fine[0]]):
        line = f"{ranks_text(fine)}: the same gradient, reduced as well, was finite before the step"
        return _own_step(facts, first, [line])
    evidence = [_line(other) for other in tier[:8]]
    failed = [line for rank in ranks for line in doubts_about(rank)]
    settled = not unseen and not missing and len(ranks) > 1
    if settled:
        evidence.append(f"{ranks_text([rank.rank for rank in ranks])}: the gradient was finite before it was reduced")
    statement = (
        f"{first.value} in the {first.role} of {place_of(first)} came out of the reduction over the ranks in "
        f"batch {first.batch}: every rank's own gradient was finite, their sum was not ({first.dtype})."
        if settled
        else f"{ranks_text([other.rank for other in tier]).capitalize()} met {first.value} in the {first.role} of "
        f"{place_of(first)} before the step of batch {first.batch}, after gradients are reduced: it may have come "
        "from any rank."
    )
    if first.cause:
        statement += f" ({first.cause})"
    return overflow_at(
        first,
        statement=statement,
        certainty="unknown" if not settled else "supported" if failed else "established",
        phase="collective",
        evidence=[*evidence, *unseen_text, *missing, *first.notes, *failed],
        next=next_steps(first, None),
        cascade=cascade_of(facts, first.attempt, {other.rank for other in diagnoses}),
    )


def _own_step(facts: RunFacts, first: LocalDiagnosis, evidence: list[str]) -> Verdict:
    """The verdict where this rank's code between its backward and its step made it."""
    rank = facts.one(first.attempt, first.rank)
    host, failed = facts.host(rank), doubts_about(rank)
    cause = f" ({first.cause})" if first.cause else ""
    return overflow_at(
        first,
        **whose(facts, first),
        statement=(
            f"Rank {first.rank}{f' on {host}' if host else ''} made {first.value} out of a finite gradient before its "
            f"step: {first.role} of {place_of(first)}, batch {first.batch}{cause}; what runs between the backward "
            "and the step did it (clipping, unscaling, the script's own code)."
        ),
        certainty="established" if first.from_page and not failed else "supported",
        phase="optimizer",
        evidence=[
            f"rank {first.rank}: the gradient was finite when the backward had made it",
            *evidence,
            *first.notes,
            *failed,
        ],
        next=[
            "Look at what the script does with gradients between backward() and step(): a norm of 0, a scale of inf."
        ],
        cascade=cascade_of(facts, first.attempt, {first.rank}),
    )


def _line(found: LocalDiagnosis) -> str:
    return f"rank {found.rank}: {found_text(found)}, batch {found.batch}"


def _rows(page: KeptPage | None, phase: str) -> dict[tuple[str, str], Row]:
    """The last row of each gradient in a phase of a page."""
    if page is None:
        return {}
    frames = sorted(page.frames, key=lambda frame: frame.index)
    return {
        (frame.module, row.role): row
        for frame in frames
        if frame.phase == phase
        for row in frame.gradients
        if row.kind == "measured"
    }


def _own_finite(page: KeptPage | None, first: LocalDiagnosis) -> bool | None:
    """Whether a rank's own gradient was finite; None if it was not seen."""
    if page is None:
        return None
    frames = sorted(page.frames, key=lambda frame: frame.index)
    frame = next((each for each in frames if each.phase == "collective" and each.module == first.module), None)
    rows = local_gradients(frames, frame, first.role) if frame is not None else []
    if frame is None:  # the rank was stopped before its step
        rows = [row for key, row in _rows(page, "backward").items() if key == (first.module, first.role)]
    if not rows:
        return None
    return all(row.finite for row in rows)


def _got_finite(page: KeptPage | None, first: LocalDiagnosis) -> bool:
    row = _rows(page, "collective").get((first.module, first.role))
    return row is not None and row.finite


def _agree(left: KeptPage | None, right: KeptPage | None) -> bool:
    """Whether two ranks got the same gradients otherwise, so that each holds what all ranks hold."""
    mine, theirs = _rows(left, "collective"), _rows(right, "collective")
    both = [key for key in mine.keys() & theirs.keys() if mine[key].finite and theirs[key].finite]
    return bool(both) and all(mine[key].abs_max == theirs[key].abs_max for key in both)
