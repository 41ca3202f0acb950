"""A gradient that was finite when a rank's backward made it, and not when the optimizer got it.

If every rank's own gradient was finite, and their sum is beyond the largest number of the dtype, the sum over the ranks
made it, and no rank is at fault. If it is not, code that no frame shows made it: clipping, normalisation, a
communication hook. If the optimizers of the other ranks got the same gradient finite, that code ran on this rank.
"""

from __future__ import annotations

from ....core.frames import Row
from ....core.records import Passed
from ...diagnose.local_diagnosis import LocalDiagnosis
from ...diagnose.step_origin import local_gradients
from ...facts.facts import RunFacts
from ...facts.kept_pages import KeptPage
from ..own_faults import doubts_about
from ..verdict_model import Verdict
from ..words import cascade_of, device_of, found_text, place_of, ranks_text
from .advice import next_steps
from .evidence import missing_ranks
from .gradient_sum import GradientSum
from .passed import Passages, way_text
from .replicas import page_of, peers
from .words import overflow_at, whose


def of_reduced(
    facts: RunFacts, tier: list[LocalDiagnosis], diagnoses: list[LocalDiagnosis], passages: Passages
) -> Verdict:
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
    failed = [line for rank in ranks for line in doubts_about(rank)]
    settled = not unseen and not missing and len(ranks) > 1
    own = {rank: row for rank, page in pages.items() if (row := _largest_own(page, first)) is not None}
    found = GradientSum(own, {rank: row for rank, page in pages.items() if (row := _got(page, first)) is not None})
    evidence = [_line(other) for other in tier[:8]]
    if settled:
        evidence.append(
            f"{ranks_text([rank.rank for rank in ranks])}: the gradient was finite when the backward had made it"
        )
        evidence += _of_sum(found, first)
    put = passages.put_into_sum(first) if settled and found.answer != "sum" else None
    statement = _statement(first, tier, found if settled else None, put)
    if first.cause:
        statement += f" ({first.cause})"
    proven = found.is_proven and not failed
    whose_code = {}
    if put is not None:
        rank = facts.one(first.attempt, put.where.rank)
        whose_code = {"rank": rank.rank, "host": facts.host(rank) or None, "device": device_of(rank)}
        evidence.append(f"rank {rank.rank} put {put.value} into {way_text(put)}, every other rank finite numbers")
    return overflow_at(
        first,
        **whose_code,
        statement=statement,
        certainty="unknown" if not settled else "established" if proven else "supported",
        phase="collective",
        evidence=[*evidence, *unseen_text, *missing, *first.notes, *failed],
        next=_next(first, found, unseen if not settled else []),
        cascade=cascade_of(facts, first.attempt, {other.rank for other in diagnoses}),
    )


def _statement(first: LocalDiagnosis, tier: list[LocalDiagnosis], found: GradientSum | None, put: Passed | None) -> str:
    """`found`: what all ranks' gradients say; None if not all of them are known. `put`: what one put into the sum."""
    what = f"{first.value} in the {first.role} of {place_of(first)}"
    if found is None:
        return (
            f"{ranks_text([other.rank for other in tier]).capitalize()} met {what} before the step of batch "
            f"{first.batch}, after gradients are reduced: it may have come from any rank."
        )
    if found.answer == "sum":
        return (
            f"{what} came out of the reduction over the ranks in batch {first.batch}: every rank's own gradient was "
            f"finite, their sum was not ({first.dtype})."
        )
    if put is not None:
        return (
            f"{what} was made by rank {put.where.rank} between its backward and {way_text(put)} in batch "
            f"{first.batch}: every rank's own gradient was finite, and {_NO_SUM[found.answer]}; code that no frame "
            "shows made it (a communication hook, the script's clipping or normalisation)."
        )
    bad = sorted({first.rank, *(rank for rank, row in found.got.items() if not row.finite)})
    return (
        f"{what} was made between the backward and the step of batch {first.batch} on {ranks_text(bad)}: every rank's "
        f"own gradient was finite, and {_NO_SUM[found.answer]}; code that no frame shows made it (the script's "
        "clipping or normalisation, a communication hook), and which rank's is not known."
    )


_NO_SUM = {"narrower": "their sum is too, unless it is reduced in float16", "no": "no sum of them gives that value"}


def _of_sum(found: GradientSum, first: LocalDiagnosis) -> list[str]:
    """What the numbers say."""
    if not found.own or not found.got:
        return []
    lines = [found.line()]
    if first.value == "nan" and found.answer == "no":
        lines.append("nan is no sum of finite numbers")
    fine = sorted(rank for rank, row in found.got.items() if row.finite)
    if fine:
        lines.append(f"{ranks_text(fine)}: what the optimizer got was finite, and a sum is the same on all ranks")
    return lines


def _next(first: LocalDiagnosis, found: GradientSum, unseen: list[int]) -> list[str]:
    if unseen:
        return [
            f"Look at what {ranks_text(unseen)} computed in that step: no gradient of "
            f"{'its' if len(unseen) == 1 else 'their'} own was seen there.",
            *next_steps(first)[-1:],
        ]
    if found.answer == "sum":
        return next_steps(first)
    of_zero = "every own gradient was 0, so a division by a norm of them is one by 0" if found.all_zero() else ""
    return [
        "Look at what the script does with gradients between backward() and step(), and at a communication hook: "
        f"{of_zero or 'a norm of 0, a count of 0 tokens, a scale of inf'}.",
        *(["Let the communication hook divide before it sums, or reduce in bfloat16."] * (found.answer == "narrower")),
        *next_steps(first)[-1:],
    ]


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


def _own(page: KeptPage | None, first: LocalDiagnosis) -> list[Row]:
    """A rank's own gradient, as its backward made it."""
    if page is None:
        return []
    frames = sorted(page.frames, key=lambda frame: frame.index)
    frame = next((each for each in frames if each.phase == "collective" and each.module == first.module), None)
    if frame is not None:
        return local_gradients(frames, frame, first.role)
    # the rank was stopped before its step
    return [row for key, row in _rows(page, "backward").items() if key == (first.module, first.role)]


def _own_finite(page: KeptPage | None, first: LocalDiagnosis) -> bool | None:
    """Whether a rank's own gradient was finite; None if it was not seen."""
    rows = _own(page, first)
    return all(row.finite for row in rows) if rows else None


def _largest_own(page: KeptPage | None, first: LocalDiagnosis) -> Row | None:
    return max(_own(page, first), key=lambda row: row.abs_max or 0.0, default=None)


def _got(page: KeptPage | None, first: LocalDiagnosis) -> Row | None:
    """What the optimizer of a rank got."""
    return _rows(page, "collective").get((first.module, first.role))


def _got_finite(page: KeptPage | None, first: LocalDiagnosis) -> bool:
    row = _got(page, first)
    return row is not None and row.finite


def _agree(left: KeptPage | None, right: KeptPage | None) -> bool:
    """Whether two ranks got the same gradients otherwise, so that each holds what all ranks hold."""
    mine, theirs = _rows(left, "collective"), _rows(right, "collective")
    both = [key for key in mine.keys() & theirs.keys() if mine[key].finite and theirs[key].finite]
    return bool(both) and all(mine[key].abs_max == theirs[key].abs_max for key in both)
