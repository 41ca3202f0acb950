"""The verdict of a run with a non-finite value: which rank and module was first, if that can be known."""

from __future__ import annotations

from dataclasses import replace

from ...core.events import PassedTensor
from ...core.frames import FramePhase, Row, RowContent
from ...core.lone_process import is_rank, rank_name
from ...core.roles import is_param_group
from ...core.verdicts import Certainty
from ..facts.diagnosis import DiagnosisOrder, LocalDiagnosis, rows_in
from ..facts.facts import RunFacts
from ..facts.kept_pages import KeptPage
from ..report.model import ConcurrentOrigin, Verdict
from ..report.sentence_parts import ranks_text
from .clean_verdict import doubts_about
from .gradient_sum import GradientSum
from .overflow_advice import clues_of, next_steps
from .overflow_evidence import evidence_of, is_compiled, large_weight, missing_ranks, number_of_ranks, of_concurrent
from .overflow_words import fed_sentence, overflow_at, sentence, skipped_sentence, unknown_sentence, whose
from .passed_values import PassedOperations, ValueArrival, as_passed, fed_lines, way_text
from .replicas import OddWeight, odd_weight, page_of, peers, run_the_same_model
from .words import cascade_of, device_of, found_text, place_of, seen_in, step_for_compiled

# A gradient that was finite when a rank's backward made it, and not when the optimizer got it.
#
# If every rank's own gradient was finite, and their sum is beyond the largest number of the dtype, the sum over the
# ranks made it, and no rank is at fault. If it is not, code that no frame shows made it: clipping, normalisation, a
# communication hook. If the optimizers of the other ranks got the same gradient finite, that code ran on this rank.


def of_reduced(
    facts: RunFacts, tier: list[LocalDiagnosis], diagnoses: list[LocalDiagnosis], passages: PassedOperations
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
        evidence += _reduced_sum(found, first)
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
        certainty=Certainty.UNKNOWN if not settled else Certainty.ESTABLISHED if proven else Certainty.SUPPORTED,
        phase=FramePhase.COLLECTIVE,
        evidence=[*evidence, *unseen_text, *missing, *first.notes, *failed],
        next=_next(first, found, unseen if not settled else []),
        cascade=cascade_of(facts, first.attempt, {other.rank for other in diagnoses}),
    )


def _statement(
    first: LocalDiagnosis, tier: list[LocalDiagnosis], found: GradientSum | None, put: PassedTensor | None
) -> str:
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


def _reduced_sum(found: GradientSum, first: LocalDiagnosis) -> list[str]:
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
        certainty=Certainty.ESTABLISHED if first.from_page and not failed else Certainty.SUPPORTED,
        phase=FramePhase.OPTIMIZER,
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


def _rows(page: KeptPage | None, phase: FramePhase) -> dict[tuple[str, str], Row]:
    if page is None:
        return {}
    frames = sorted(page.frames, key=lambda frame: frame.index)
    return {
        (frame.module, row.role): row
        for frame in frames
        if frame.phase == phase
        for row in frame.gradients
        if row.kind == RowContent.MEASURED
    }


def _own(page: KeptPage | None, first: LocalDiagnosis) -> list[Row]:
    if page is None:
        return []
    frames = sorted(page.frames, key=lambda frame: frame.index)
    frame = next((each for each in frames if each.phase == FramePhase.COLLECTIVE and each.module == first.module), None)
    if frame is not None:
        return rows_in(frames, FramePhase.BACKWARD, frame, first.role, before=True)
    # the rank was stopped before its step
    return [row for key, row in _rows(page, FramePhase.BACKWARD).items() if key == (first.module, first.role)]


def _own_finite(page: KeptPage | None, first: LocalDiagnosis) -> bool | None:
    rows = _own(page, first)
    return all(row.finite for row in rows) if rows else None


def _largest_own(page: KeptPage | None, first: LocalDiagnosis) -> Row | None:
    return max(_own(page, first), key=lambda row: row.abs_max or 0.0, default=None)


def _got(page: KeptPage | None, first: LocalDiagnosis) -> Row | None:
    return _rows(page, FramePhase.COLLECTIVE).get((first.module, first.role))


def _got_finite(page: KeptPage | None, first: LocalDiagnosis) -> bool:
    row = _got(page, first)
    return row is not None and row.finite


def _agree(left: KeptPage | None, right: KeptPage | None) -> bool:
    """Whether two ranks got the same gradients otherwise, so that each holds what all ranks hold."""
    mine, theirs = _rows(left, FramePhase.COLLECTIVE), _rows(right, FramePhase.COLLECTIVE)
    both = [key for key in mine.keys() & theirs.keys() if mine[key].finite and theirs[key].finite]
    return bool(both) and all(mine[key].abs_max == theirs[key].abs_max for key in both)


_TIERS = (
    ("made", "changed"),
    ("outside", "weight", "unread", "left"),
    ("skipped",),
    ("reduced",),
    ("received",),
    ("carried",),
)
"""Ranks of diagnoses that nothing puts in order. A value's maker may have passed it to the others, not vice versa."""
_MOST_PASSED = 8
"""Of so many ranks that were fed it, it is looked for what may have brought it."""


def overflow_verdict(facts: RunFacts) -> Verdict | None:
    """The earliest non-finite value of the earliest attempt that saw one; None if there was none."""
    diagnoses = [rank.diagnosis for rank in facts.everyone.values() if rank.diagnosis is not None]
    if not diagnoses:
        return None
    first_attempt = min(diagnosis.attempt for diagnosis in diagnoses)
    diagnoses = sorted(
        (d for d in diagnoses if d.attempt == first_attempt), key=lambda d: (not is_rank(d.rank), d.rank)
    )
    order = DiagnosisOrder(diagnoses)
    level = order.earliest()
    outside = [d for d in level if d.source == "outside"][:_MOST_PASSED]
    level = [as_passed(facts, d) if d in outside else d for d in level]
    tier = next(found for tier in _TIERS if (found := [d for d in level if d.source in tier]))
    first = tier[0]
    passages = PassedOperations(facts, first_attempt)
    fed = passages.fed_by(first)
    if fed is not None:
        return _fed(facts, tier, diagnoses, order, passages, fed)
    if first.source == "reduced":
        return of_reduced(facts, tier, diagnoses, passages)
    alone = len(tier) == 1
    if first.source == "skipped":
        return _skipped(facts, tier, diagnoses, order) if alone else _unknown(facts, tier)
    if first.source == "received" or (not alone and all(d.source in ("weight", "unread", "carried") for d in tier)):
        return _unknown(facts, tier)
    if first.source == "weight" and is_param_group(first.module) and number_of_ranks(facts, first_attempt) > 1:
        return _unknown(facts, tier)  # its gradient may be a sum of all ranks' gradients, and nobody has looked at it
    rest = tier[1:]
    page = page_of(facts, first)
    rest += [  # each rank may have been fed it, unless one rank is fed what another has made
        d
        for d in level
        if d not in tier
        and d.source in ("outside", "weight", "unread", "left")
        and run_the_same_model(page, page_of(facts, d))
    ]
    odd = (
        odd_weight(facts, first)
        if first.source in ("made", "weight") and first.phase in (FramePhase.FORWARD, FramePhase.WEIGHT)
        else None
    )
    if odd is not None and odd.certain:
        first = _of_weight(first, odd)
    return _named(facts, first, rest, diagnoses, order, odd)


def _fed(
    facts: RunFacts,
    tier: list[LocalDiagnosis],
    diagnoses: list[LocalDiagnosis],
    order: DiagnosisOrder,
    passages: PassedOperations,
    fed: ValueArrival,
) -> Verdict:
    """The verdict where another rank has passed the value on, or a sum over the ranks has made it."""
    met = tier[0]
    put = fed.put
    if put is None:
        return _of_sum(facts, met, diagnoses, fed)
    others = [one for one in tier[1:] if (theirs := passages.fed_by(one)) is None or theirs.rank != fed.rank]
    own = next((one for one in diagnoses if one.rank == fed.rank), None)
    was_there = own is not None and (own.seq <= put.where.seq or own.step <= put.where.step)
    if own is not None and was_there and (own.source in ("outside", "weight") or own.seq <= put.where.seq):
        first = replace(own, notes=(*own.notes, *fed_lines(fed)))
        return _named(facts, first, [one for one in others if one is not own], diagnoses, order, None)
    rank = facts.ranks[met.attempt, put.where.rank]
    return overflow_at(
        met,
        rank=rank.rank,
        host=facts.host(rank) or None,
        device=device_of(rank),
        module=None,
        cls=None,
        role=None,
        root=None,
        phase=FramePhase.COLLECTIVE,
        value=put.value,
        step=put.where.step,
        batch=put.where.batch,
        statement=fed_sentence(met, fed, facts.host(rank)),
        certainty=Certainty.SUPPORTED,
        evidence=[*fed_lines(fed), *met.notes, f"rank {rank.rank}: no module call of its own is known to have made it"],
        next=[f"Look at what rank {rank.rank} computes outside of its modules, or is handed, before {way_text(put)}."],
        cascade=cascade_of(facts, met.attempt, {rank.rank}),
    )


def _of_sum(facts: RunFacts, met: LocalDiagnosis, diagnoses: list[LocalDiagnosis], fed: ValueArrival) -> Verdict:
    """The verdict where every rank put finite numbers into a reduction, and what came out was not finite."""
    failed = [line for rank in facts.of_attempt(met.attempt) for line in doubts_about(rank)]
    came = fed.ways[-1]
    return overflow_at(
        met,
        module=None,
        cls=None,
        role=None,
        root=None,
        phase=FramePhase.COLLECTIVE,
        statement=f"{came.value} came out of {way_text(came)} in batch {met.batch}: what every rank put in was finite, "
        f"their sum was not ({came.dtype}).",
        certainty=Certainty.SUPPORTED if failed else Certainty.ESTABLISHED,
        evidence=[*fed_lines(fed), *met.notes, *failed],
        next=["Divide before the sum, or add up in float32 or bfloat16."],
        cascade=cascade_of(facts, met.attempt, {other.rank for other in diagnoses}),
    )


def _of_weight(first: LocalDiagnosis, odd: OddWeight) -> LocalDiagnosis:
    """The diagnosis that blames the rank's copy of a weight for what looked like an overflow in its module."""
    if first.phase == FramePhase.WEIGHT and first.role == odd.row.role:
        return replace(first, sure=first.sure or bool(first.history))  # the other copies tell more than its own past
    note = f"its {first.role} had {first.value}, out of finite inputs"
    return replace(
        first, phase=FramePhase.WEIGHT, source="weight", role=odd.row.role, between=None, notes=(*first.notes, note)
    )


def _named(
    facts: RunFacts,
    first: LocalDiagnosis,
    rest: list[LocalDiagnosis],
    diagnoses: list[LocalDiagnosis],
    order: DiagnosisOrder,
    odd: OddWeight | None,
) -> Verdict:
    host = facts.host(facts.one(first.attempt, first.rank))
    blamed = odd if odd is not None and odd.certain else None
    page = page_of(facts, first)
    large = large_weight(page, first.frame) if page is not None and first.step == 0 and first.is_origin else None
    clues = clues_of(facts, first, odd, blamed, large[0] if large is not None else "")
    certainty, evidence = evidence_of(facts, first, diagnoses, order, rest, odd, clues.wild)
    if large is not None:
        evidence.append(f"the largest weight up to there: {large[0]}, abs max {large[1]}")
    return overflow_at(
        first,
        **whose(facts, first),
        statement=sentence(first, host, rest, blamed, number_of_ranks(facts, first.attempt)),
        certainty=certainty,
        between=first.between,
        evidence=evidence,
        next=[
            *([step_for_compiled([facts.one(first.attempt, first.rank)])] if is_compiled(facts, first) else []),
            *next_steps(first, clues),
        ],
        concurrent=[
            ConcurrentOrigin(
                d.rank,
                d.module,
                d.cls,
                d.own_role,
                d.value,
                facts.host(facts.one(d.attempt, d.rank)),
                found_text(d),
                seen_in(d),
            )
            for d in rest
        ],
        cascade=cascade_of(facts, first.attempt, {first.rank, *(d.rank for d in rest)}),
    )


def _skipped(
    facts: RunFacts, tier: list[LocalDiagnosis], diagnoses: list[LocalDiagnosis], order: DiagnosisOrder
) -> Verdict:
    """The rank is known. What happened in it is not: its batch was skipped."""
    first = tier[0]
    host = facts.host(facts.one(first.attempt, first.rank))
    evidence = [f"{rank_name(first.rank)}, batch {first.batch}: {found_text(first)}"]
    evidence += of_concurrent(first, [d for d in diagnoses if d is not first and not order.before(first, d)])
    return overflow_at(
        first,
        **whose(facts, first),
        module=None,
        cls=None,
        statement=skipped_sentence(first, host),
        certainty=Certainty.SUPPORTED,
        evidence=evidence,
        next=next_steps(first),
        cascade=cascade_of(facts, first.attempt, {first.rank}),
    )


def _unknown(facts: RunFacts, tier: list[LocalDiagnosis]) -> Verdict:
    """Several ranks met it at once, and none made it in a watched place. No rank is named."""
    first = tier[0]
    skipped = first.source == "skipped"
    return overflow_at(
        first,
        statement=unknown_sentence(tier),
        certainty=Certainty.UNKNOWN,
        module=None if skipped else first.module,
        cls=None if skipped else first.cls,
        evidence=[
            *(f"{rank_name(d.rank)}: {found_text(d)}, batch {d.batch}" for d in tier[:8]),
            *first.notes,
        ],
        between=first.between,
        next=next_steps(first, clues_of(facts, first)),
    )
