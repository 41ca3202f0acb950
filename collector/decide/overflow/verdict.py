"""The verdict of a run with a non-finite value: which rank and module was first, if that can be known."""

from __future__ import annotations

from dataclasses import replace

from ....core.recorder.lone_process import is_rank, rank_name
from ....core.roles import is_param_group
from ...diagnose.local_diagnosis import LocalDiagnosis
from ...facts.facts import RunFacts
from ..own_faults import doubts_about
from ..verdict_model import Concurrent, Verdict
from ..words import cascade_of, device_of, found_text, seen_in, step_for_compiled
from .advice import clues_of, next_steps
from .evidence import evidence_of, is_compiled, large_weight, number_of_ranks, of_concurrent
from .handed_on import as_passed
from .order import Order
from .passed import Fed, Passages, fed_lines, way_text
from .reduction import of_reduced
from .replicas import OddWeight, odd_weight, page_of, run_the_same_model
from .words import fed_sentence, overflow_at, sentence, skipped_sentence, unknown_sentence, whose

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
    order = Order(diagnoses)
    level = order.earliest()
    outside = [d for d in level if d.source == "outside"][:_MOST_PASSED]
    level = [as_passed(facts, d) if d in outside else d for d in level]
    tier = next(found for tier in _TIERS if (found := [d for d in level if d.source in tier]))
    first = tier[0]
    passages = Passages(facts, first_attempt)
    fed = passages.fed_by(first)
    if fed is not None:
        return _fed(facts, tier, diagnoses, order, passages, fed)
    if first.source == "reduced":
        return of_reduced(facts, tier, diagnoses)
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
        if first.source in ("made", "weight") and first.phase in ("forward", "weight")
        else None
    )
    if odd is not None and odd.certain:
        first = _of_weight(first, odd)
    return _named(facts, first, rest, diagnoses, order, odd)


def _fed(
    facts: RunFacts,
    tier: list[LocalDiagnosis],
    diagnoses: list[LocalDiagnosis],
    order: Order,
    passages: Passages,
    fed: Fed,
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
        phase="collective",
        value=put.value,
        step=put.where.step,
        batch=put.where.batch,
        statement=fed_sentence(met, fed, facts.host(rank)),
        certainty="supported",
        evidence=[*fed_lines(fed), *met.notes, f"rank {rank.rank}: no module call of its own is known to have made it"],
        next=[f"Look at what rank {rank.rank} computes outside of its modules, or is handed, before {way_text(put)}."],
        cascade=cascade_of(facts, met.attempt, {rank.rank}),
    )


def _of_sum(facts: RunFacts, met: LocalDiagnosis, diagnoses: list[LocalDiagnosis], fed: Fed) -> Verdict:
    """The verdict where every rank put finite numbers into a reduction, and what came out was not finite."""
    failed = [line for rank in facts.of_attempt(met.attempt) for line in doubts_about(rank)]
    came = fed.ways[-1]
    return overflow_at(
        met,
        module=None,
        cls=None,
        role=None,
        root=None,
        phase="collective",
        statement=f"{came.value} came out of {way_text(came)} in batch {met.batch}: what every rank put in was finite, "
        f"their sum was not ({came.dtype}).",
        certainty="supported" if failed else "established",
        evidence=[*fed_lines(fed), *met.notes, *failed],
        next=["Divide before the sum, or add up in float32 or bfloat16."],
        cascade=cascade_of(facts, met.attempt, {other.rank for other in diagnoses}),
    )


def _of_weight(first: LocalDiagnosis, odd: OddWeight) -> LocalDiagnosis:
    """The diagnosis that blames the rank's copy of a weight for what looked like an overflow in its module."""
    if first.phase == "weight" and first.role == odd.row.role:
        return replace(first, sure=first.sure or bool(first.history))  # the other copies tell more than its own past
    note = f"its {first.role} had {first.value}, out of finite inputs"
    return replace(first, phase="weight", source="weight", role=odd.row.role, between=None, notes=(*first.notes, note))


def _named(
    facts: RunFacts,
    first: LocalDiagnosis,
    rest: list[LocalDiagnosis],
    diagnoses: list[LocalDiagnosis],
    order: Order,
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
            Concurrent(
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


def _skipped(facts: RunFacts, tier: list[LocalDiagnosis], diagnoses: list[LocalDiagnosis], order: Order) -> Verdict:
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
        certainty="supported",
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
        certainty="unknown",
        module=None if skipped else first.module,
        cls=None if skipped else first.cls,
        evidence=[
            *(f"{rank_name(d.rank)}: {found_text(d)}, batch {d.batch}" for d in tier[:8]),
            *first.notes,
        ],
        between=first.between,
        next=next_steps(first, clues_of(facts, first)),
    )
