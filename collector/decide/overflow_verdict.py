"""The verdict of a run in which a non-finite value was seen: which rank and module was first, if that can be known."""

from __future__ import annotations

from dataclasses import replace

from ..diagnose.local_diagnosis import LocalDiagnosis, from_event
from ..diagnose.origin import analyze
from ..facts import RankFacts, RunFacts
from .order import before, earliest
from .overflow_at import overflow_at, whose
from .overflow_evidence import evidence_of, of_concurrent
from .overflow_words import next_steps, sentence, unknown_sentence, unlooked_sentence
from .reduction import of_reduced
from .replicas import OddWeight, odd_weight, page_of, run_the_same_model
from .verdict_model import Concurrent, Verdict
from .words import cascade_of, finding_text

_TIERS = (("made",), ("outside", "weight"), ("unlooked",), ("reduced",), ("received",), ("carried",))
"""Of what nothing puts in order: who made a value may have handed it to the others, and not the other way round."""


def overflow_verdict(facts: RunFacts) -> Verdict | None:
    """The earliest non-finite value of the earliest attempt that saw one; None if there was none."""
    findings = [finding for rank in facts.ranks.values() if (finding := finding_of(rank)) is not None]
    if not findings:
        return None
    first_attempt = min(finding.attempt for finding in findings)
    findings = sorted((f for f in findings if f.attempt == first_attempt), key=lambda f: f.rank)
    level = earliest(findings)
    tier = next(found for tier in _TIERS if (found := [f for f in level if f.source in tier]))
    first = tier[0]
    if first.source == "reduced":
        return of_reduced(facts, tier, findings)
    alone = len(tier) == 1
    if first.source == "unlooked":
        return _unlooked(facts, tier, findings) if alone else _unknown(tier)
    if first.source == "received" or (not alone and all(f.source in ("weight", "carried") for f in tier)):
        return _unknown(tier)
    rest = tier[1:]
    page = page_of(facts, first)
    rest += [  # a batch of its own may have brought it, unless what a rank is fed is what another one has made
        f
        for f in level
        if f not in tier and f.source in ("outside", "weight") and run_the_same_model(page, page_of(facts, f))
    ]
    odd = (
        odd_weight(facts, first)
        if first.source in ("made", "weight") and first.phase in ("forward", "weight")
        else None
    )
    if odd is not None:
        first = _of_weight(first, odd)
    return _named(facts, first, rest, findings, odd)


def finding_of(rank: RankFacts) -> LocalDiagnosis | None:
    """The first bad value of a rank, from its page if it is there."""
    if not rank.anomalies:
        return None
    anomaly = rank.anomalies[0]
    page = rank.pages.get(anomaly.where.page)
    return analyze(page, anomaly) if page is not None else from_event(anomaly)


def _of_weight(first: LocalDiagnosis, odd: OddWeight) -> LocalDiagnosis:
    """What looked like an overflow in a module is that rank's copy of its weight."""
    if first.phase == "weight" and first.role == odd.row.role:
        return first
    note = f"its {first.role} had {first.value}, out of finite inputs"
    return replace(first, phase="weight", source="weight", role=odd.row.role, between=None, notes=(*first.notes, note))


def _named(
    facts: RunFacts,
    first: LocalDiagnosis,
    rest: list[LocalDiagnosis],
    findings: list[LocalDiagnosis],
    odd: OddWeight | None,
) -> Verdict:
    host = facts.host(facts.ranks[first.attempt, first.rank])
    certainty, evidence = evidence_of(facts, first, findings, rest, odd)
    return overflow_at(
        first,
        **whose(facts, first),
        statement=sentence(first, host, [f.rank for f in rest], odd),
        certainty=certainty,
        between=first.between,
        evidence=evidence,
        next=next_steps(first, odd),
        concurrent=[
            Concurrent(f.rank, f.module, f.cls, f.role, f.value, facts.host(facts.ranks[f.attempt, f.rank]))
            for f in rest
        ],
        cascade=cascade_of(facts, first.attempt, {first.rank, *(f.rank for f in rest)}),
    )


def _unlooked(facts: RunFacts, tier: list[LocalDiagnosis], findings: list[LocalDiagnosis]) -> Verdict:
    """The rank is known, and nothing of what happened in it."""
    first = tier[0]
    host = facts.host(facts.ranks[first.attempt, first.rank])
    evidence = [f"rank {first.rank}, batch {first.batch}: {first.value} in the {first.role} of {finding_text(first)}"]
    evidence += of_concurrent(first, [f for f in findings if f is not first and not before(first, f)])
    return overflow_at(
        first,
        **whose(facts, first),
        module=None,
        cls=None,
        statement=unlooked_sentence(first, host),
        certainty="supported",
        evidence=evidence,
        next=next_steps(first, None),
        cascade=cascade_of(facts, first.attempt, {first.rank}),
    )


def _unknown(tier: list[LocalDiagnosis]) -> Verdict:
    """Several ranks met it at once and none made it in a watched place: say so, name nobody."""
    first = tier[0]
    unlooked = first.source == "unlooked"
    return Verdict(
        kind="overflow",
        statement=unknown_sentence(tier),
        certainty="unknown",
        module=None if unlooked else first.module,
        cls=None if unlooked else first.cls,
        root=first.root,
        phase=first.phase,
        role=first.role,
        value=first.value,
        dtype=first.dtype,
        attempt=first.attempt,
        step=first.step,
        batch=first.batch,
        evidence=[
            *(f"rank {f.rank}: {f.value} in {f.role} of {finding_text(f)}, batch {f.batch}" for f in tier[:8]),
            *first.notes,
        ],
        between=first.between,
        next=next_steps(first, None),
    )
