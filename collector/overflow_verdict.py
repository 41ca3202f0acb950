"""The verdict of a run in which a non-finite value was seen: which rank and module was first, if that can be known."""

from __future__ import annotations

from ..core.frames import Page
from .answer import Concurrent, Verdict
from .facts import RankFacts, RunFacts
from .origin import Finding, analyze, from_event
from .words import between_text, cascade_of, device_of, finding_text, ranks_text


def overflow_verdict(facts: RunFacts) -> Verdict | None:
    """The earliest non-finite value of the earliest attempt that saw one; None if there was none."""
    findings = [finding for rank in facts.ranks.values() if (finding := finding_of(rank)) is not None]
    if not findings:
        return None
    first_attempt = min(finding.attempt for finding in findings)
    findings = sorted((f for f in findings if f.attempt == first_attempt), key=lambda f: (_order(f), f.rank))
    earliest = [finding for finding in findings if _order(finding) == _order(findings[0])]
    candidates = [finding for finding in earliest if finding.is_origin or finding.phase == "input"]
    if not candidates and (len(earliest) > 1 or earliest[0].phase == "collective"):
        return _unknown_overflow(facts, earliest)
    first, *rest = candidates or earliest
    rank = facts.ranks[first.attempt, first.rank]
    host = facts.host(rank)
    concurrent = [
        Concurrent(f.rank, f.module, f.cls, f.role, f.value, facts.host(facts.ranks[f.attempt, f.rank])) for f in rest
    ]
    certainty, evidence = _evidence(facts, first, findings, rest)
    return Verdict(
        kind="overflow",
        statement=_overflow_sentence(first, host, rest),
        certainty=certainty,
        rank=first.rank,
        host=host or None,
        device=device_of(rank),
        module=first.module,
        cls=first.cls,
        root=first.root,
        phase="forward" if first.phase == "carrier" else first.phase,
        role=first.role,
        value=first.value,
        dtype=first.dtype,
        attempt=first.attempt,
        step=first.step,
        batch=first.batch,
        between=first.between,
        evidence=evidence,
        next=_overflow_next(first),
        concurrent=concurrent,
        cascade=cascade_of(facts, first.attempt, {first.rank, *(f.rank for f in rest)}),
    )


def finding_of(rank: RankFacts) -> Finding | None:
    """The first bad value of a rank, from its page if it is there."""
    if not rank.anomalies:
        return None
    anomaly = rank.anomalies[0]
    page = rank.pages.get(anomaly.where.page)
    return analyze(page, anomaly) if page is not None else from_event(anomaly)


def _order(finding: Finding) -> tuple[int, int, int]:
    """Before any collective (-1) only steps and batches put ranks in order."""
    return (finding.seq, finding.step, finding.batch) if finding.seq < 0 else (finding.seq, 0, 0)


def _evidence(
    facts: RunFacts, first: Finding, findings: list[Finding], concurrent: list[Finding]
) -> tuple[str, list[str]]:
    evidence: list[str] = []
    certainty = "established"
    where = f"batch {first.batch}, frame {first.frame}"
    if first.is_origin:
        evidence.append(
            f"rank {first.rank}, {where}: inputs and weights of {finding_text(first)} were finite, "
            f"its {first.role} was not"
            if first.between is None
            else f"rank {first.rank}, {where}: no module call before it returned a non-finite value"
        )
    elif first.phase == "carrier":
        certainty = "supported"
        evidence.append(
            f"rank {first.rank}, {where}: {finding_text(first)} was handed a non-finite value; its maker was not seen"
        )
    if not first.from_page:
        certainty = "supported"
        evidence.append(f"the frames of batch {first.batch} of rank {first.rank} were not received, only the event")
    if concurrent:
        certainty = "supported"
        evidence.append(
            f"{ranks_text([f.rank for f in concurrent])}: an origin of its own in the same stretch between two "
            "collectives; nothing puts them in order"
        )
    unsettled = _unsettled(facts, first, findings)
    if unsettled:
        certainty = "supported"
        evidence += unsettled
    later = [f for f in findings if _order(f) > _order(first)]
    for finding in later[:8]:
        when = f", after {finding.seq} collectives against {first.seq}" if first.seq >= 0 else ""
        evidence.append(
            f"rank {finding.rank} first saw one later: batch {finding.batch}, {finding_text(finding)}{when}"
        )
    if later and first.seq < 0:
        certainty = "supported"
        evidence.append("the ranks had no process group, so their batches alone put them in order")
    clean = _clean_peers(facts, first)
    if clean:
        evidence.append(f"{ranks_text(clean)}: every frame received of that batch was finite")
    return certainty, evidence


def _unsettled(facts: RunFacts, first: Finding, findings: list[Finding]) -> list[str]:
    """Why another rank might have been first without our knowing it; empty when none can have been."""
    reasons: list[str] = []
    ranks = facts.of_attempt(first.attempt)
    hellos = [node.hello for node in facts.nodes.values() if node.hello is not None]
    expected_nodes = max((hello.min_nodes for hello in hellos), default=1)
    missing = sum(hello.nproc for hello in hellos) - len(ranks)
    if len(hellos) < expected_nodes:
        reasons.append(f"{expected_nodes - len(hellos)} of {expected_nodes} nodes were never heard")
    if missing > 0:
        reasons.append(f"{missing} ranks were never heard")
    heard = {finding.rank for finding in findings} | set(_clean_peers(facts, first))
    # What a rank was handed could have been handed to all: there only a clean page of the same batch clears a peer.
    if first.phase not in ("weight", "carrier"):
        heard |= {rank.rank for rank in ranks if rank.exit is not None}
    unheard = [rank.rank for rank in ranks if rank.rank not in heard]
    if unheard:
        reasons.append(f"{ranks_text(unheard)}: no frames of that batch were received, so the same may be true there")
    return reasons


def _clean_peers(facts: RunFacts, first: Finding) -> list[int]:
    return [
        rank.rank
        for rank in facts.of_attempt(first.attempt)
        if rank.rank != first.rank
        and (page := page_of_batch(rank, first.root, first.batch)) is not None
        and all(row.finite for frame in page.frames for row in frame.rows)
    ]


def page_of_batch(rank: RankFacts, root: str, batch: int) -> Page | None:
    """The page of one batch of one root, if it was received."""
    return next((p for p in rank.pages.values() if p.batch == batch and p.root == root), None)


def _unknown_overflow(facts: RunFacts, earliest: list[Finding]) -> Verdict:
    """Several ranks met it at once and none made it in a watched place: say so, name nobody."""
    first = earliest[0]
    what = "a non-finite weight" if first.phase == "weight" else "a non-finite value"
    who = ranks_text([f.rank for f in earliest]).capitalize()
    if first.phase == "collective":
        statement = (
            f"{who} met {what} in batch {first.batch} in {finding_text(first)}'s own forward, "
            f"{between_text(first.between or (None, None))}; collectives ran there, so it may have come from any rank."
        )
    else:
        statement = (
            f"{who} met {what} in batch {first.batch} at the same point (`{first.module}`, {first.role}); "
            "it was made before, where nobody looked, so the first rank is unknown."
        )
    return Verdict(
        kind="overflow",
        statement=statement,
        certainty="unknown",
        module=first.module,
        cls=first.cls,
        root=first.root,
        phase=first.phase if first.phase != "carrier" else "forward",
        role=first.role,
        value=first.value,
        dtype=first.dtype,
        attempt=first.attempt,
        step=first.step,
        batch=first.batch,
        evidence=[f"rank {f.rank}: {f.value} in {f.role} of {finding_text(f)}, batch {f.batch}" for f in earliest[:8]],
        between=first.between,
        next=["Look at the gradients and the optimizer of the step before."] if first.phase == "weight" else [],
    )


def _overflow_sentence(first: Finding, host: str, concurrent: list[Finding]) -> str:
    who = f"Rank {first.rank}{f' on {host}' if host else ''}"
    if concurrent:
        who += f" and, concurrently, {ranks_text([f.rank for f in concurrent])}"
    lead = f"{who} overflowed first: "
    if concurrent:
        lead = f"{who} overflowed: "
    batch = f"batch {first.batch}" + (f" (step {first.step})" if first.step != first.batch else "")
    if first.phase == "weight":
        return (
            f"{who} had {first.value} in the {first.role} of {finding_text(first)} "
            f"at the start of its forward in {batch}."
        )
    if first.phase == "input":
        return (
            f"{who} was fed {first.value}: {first.role} of {finding_text(first)} in {batch} "
            "was bad before the model saw it."
        )
    if first.phase == "carrier":
        return (
            f"{who} handed {first.value} to {finding_text(first)} ({first.role}) in {batch}; "
            "where it was made was not seen."
        )
    if first.between is not None:
        return f"{lead}{first.value} in {finding_text(first)}'s own forward, {between_text(first.between)}, {batch}."
    return f"{lead}{first.value} in the {first.role} of {finding_text(first)}, forward, {batch}."


def _overflow_next(first: Finding) -> list[str]:
    steps = []
    if first.is_origin and first.dtype == "float16":
        steps.append(
            "float16 ends at 65504: compute this part in bfloat16, or in float32 under torch.autocast(enabled=False)."
        )
    if first.is_origin:
        steps.append(
            "Look at abs max in the frames before it: growth over many batches means a learning rate that is too high."
        )
    elif first.phase == "input":
        steps.append("Look at the data loader of this rank: the value was in the batch.")
    elif first.phase == "weight":
        steps.append("The step before made it: look at the gradients and the learning rate.")
    steps.append(
        "To see whole batches: gpuwatch launch --trace-batches N,N; to train on past it: --on-overflow continue."
    )
    return steps
