"""The verdict of a run that its preflight stopped, and of a check: which ranks are to blame, and which are victims."""

from __future__ import annotations

from ...core.preflight import PreflightFinding
from ...core.text import ranks_text
from ...core.verdicts import Certainty, VerdictKind
from ..facts.facts import RankFacts, RunFacts
from ..report.model import CascadedRank, Verdict
from .preflight_table import findings_of, seconds_of, stage_order
from .words import local_rank_of, node_name, unfinished_stage

_MAX_LINES = 12
_CERTAINTY = dict.fromkeys(("rank", "gpu", "node"), Certainty.ESTABLISHED) | {"link": Certainty.SUPPORTED}
"""Subject -> certainty. Where the subject is the whole job, it is unknown who is to blame."""


def preflight_verdict(facts: RunFacts) -> Verdict | None:
    """The ranks to blame for the stop; None if the preflight stopped nothing."""
    attempt = facts.last_attempt
    ranks = facts.of_attempt(attempt)
    if not any(rank.preflight is not None and rank.preflight.stops for rank in ranks):
        return None
    failures = [finding for finding in findings_of(ranks) if finding.grade == "fail"]
    if failures:
        return _of_findings(facts, ranks, failures)
    if any(rank.preflight is not None and rank.preflight.outcome in ("failed", "victim") for rank in ranks):
        return _of_outcomes(facts, ranks)
    return _of_silence(facts, silent_of(facts, ranks))


def check_verdict(facts: RunFacts) -> Verdict | None:
    """The verdict of a check that nothing stopped: all stages passed, or a rank was never heard."""
    if not facts.check_only:
        return None
    ranks = facts.of_attempt(facts.last_attempt)
    silent = silent_of(facts, ranks)
    if silent:
        return _of_silence(facts, silent)
    if any(node.bye is None or node.bye.outcome != "ok" for node in facts.nodes.values()):
        return None
    findings = findings_of(ranks)
    warned = sum(finding.grade == "warn" for finding in findings)
    unknown = sum(finding.grade == "unknown" for finding in findings)
    noted = [
        *([f"{warned} warning{'s' if warned != 1 else ''}"] if warned else []),
        *([f"{unknown} unknown"] if unknown else []),
    ]
    nodes = len({rank.agent for rank in ranks})
    seconds = max((seconds_of(rank) for rank in ranks), default=0.0)
    return Verdict(
        kind=VerdictKind.CLEAN,
        statement=(
            f"Preflight passed: {_count(len(ranks), 'rank')} on {_count(nodes, 'node')} in {seconds:.1f} s"
            f"{', with ' + ' and '.join(noted) if noted else ''}."
        ),
        certainty=Certainty.ESTABLISHED,
        attempt=facts.last_attempt,
        evidence=[_line(finding) for finding in findings[:_MAX_LINES]],
        next=list(dict.fromkeys(finding.next for finding in findings if finding.next))[:_MAX_LINES],
    )


def _of_silence(facts: RunFacts, silent: str) -> Verdict:
    missing = _nodes_missing(facts)
    return Verdict(
        kind=VerdictKind.PREFLIGHT,
        statement=f"Preflight: {silent or 'it was stopped, and nobody said why'}.",
        certainty=Certainty.ESTABLISHED if missing else Certainty.UNKNOWN,
        attempt=facts.last_attempt,
        stage="arrive" if missing else None,
        evidence=[f"heard: {_names(sorted(node_name(node) for node in facts.nodes.values()))}"],
        next=["Look whether it was started on every node with the same options, and what it printed there."],
    )


def silent_of(facts: RunFacts, ranks: list[RankFacts]) -> str:
    """Nodes and ranks without a result, in words; "" if there are none."""
    missing = _nodes_missing(facts)
    if missing:
        expected = max(node.hello.min_nodes for node in facts.nodes.values() if node.hello is not None)
        return f"{missing} of {expected} nodes did not arrive"
    without = [rank.rank for rank in ranks if rank.preflight is None or rank.preflight.outcome == "skipped"]
    expected = sum(node.hello.nproc for node in facts.nodes.values() if node.hello is not None)
    if without:
        why = next(
            (rank.preflight.detail for rank in ranks if rank.preflight is not None and rank.preflight.detail), ""
        )
        return f"{ranks_text(without)} gave no result{f' ({why})' if why else ''}"
    if len(ranks) < expected:
        return f"{_count(expected - len(ranks), 'rank')} of {expected} never started"
    return ""


def _nodes_missing(facts: RunFacts) -> int:
    hellos = [node.hello for node in facts.nodes.values() if node.hello is not None]
    return max(0, max((hello.min_nodes for hello in hellos), default=0) - len(hellos))


def _of_findings(facts: RunFacts, ranks: list[RankFacts], failures: list[PreflightFinding]) -> Verdict:
    """The first failed stage gives the reason. Later failures may be its consequence, so they are evidence."""
    first = failures[0]
    same = [finding for finding in failures[1:] if finding.stage == first.stage]
    later = [finding for finding in failures[1:] if finding.stage != first.stage]
    guilty = {rank for finding in failures if finding.subject != "job" for rank in finding.ranks}
    victims = {rank for finding in failures for rank in finding.victims} - guilty
    victims |= {r.rank for r in ranks if r.preflight is not None and r.preflight.outcome == "victim"} - guilty
    alone = first.ranks[0] if first.subject in ("rank", "gpu") and len(first.ranks) == 1 else None
    known = facts.ranks.get((facts.last_attempt, alone)) if alone is not None else None
    named = first.subject in ("rank", "gpu", "node")
    more = f" And {_count(len(same), 'other finding')} in the same stage." if same else ""
    return Verdict(
        kind=VerdictKind.PREFLIGHT,
        statement=f"Preflight, stage {first.stage}: {first.sentence.rstrip('. ')}.{more}",
        certainty=_CERTAINTY.get(first.subject, Certainty.UNKNOWN),
        rank=alone,
        host=first.hosts[0] if named and len(first.hosts) == 1 else None,
        device=first.device or (known.preflight.device or None if known is not None and known.preflight else None),
        attempt=facts.last_attempt,
        stage=first.stage,
        evidence=[
            *(_line(finding) for finding in same[:_MAX_LINES]),
            *(f"later, in stage {finding.stage}: {finding.sentence}" for finding in later[:_MAX_LINES]),
            *_told_by(facts, ranks, first),
            *_witnesses(ranks, first),
        ],
        next=list(dict.fromkeys(finding.next for finding in [first, *same, *later] if finding.next))[:_MAX_LINES],
        cascade=[CascadedRank(rank, _victim_text(facts, rank, first)) for rank in sorted(victims)],
    )


def _told_by(facts: RunFacts, ranks: list[RankFacts], first: PreflightFinding) -> list[str]:
    """What the blamed ranks say of themselves."""
    lines = []
    for rank in ranks:
        result = rank.preflight
        if rank.rank not in first.ranks or result is None or result.outcome != "failed":
            continue
        if result.detail and result.detail not in first.sentence:
            lines.append(f"rank {rank.rank} on {facts.host(rank)}: {_outcome_text(rank)}")
    return lines[:_MAX_LINES]


def _witnesses(ranks: list[RankFacts], first: PreflightFinding) -> list[str]:
    """The ranks that passed the failed stage, and those that never ended it."""
    passed = [r.rank for r in ranks if any(s.stage == first.stage and s.grade != "fail" for s in r.stages)]
    passed = [rank for rank in passed if rank not in first.ranks and rank not in first.victims]
    stuck = [rank.rank for rank in ranks if unfinished_stage(rank) == first.stage]
    lines = [f"{ranks_text(passed)} came through stage {first.stage}"] if passed else []
    return [*lines, f"{ranks_text(stuck)} did not end it"] if stuck else lines


def _victim_text(facts: RunFacts, number: int, first: PreflightFinding) -> str:
    rank = facts.ranks.get((facts.last_attempt, number))
    if rank is not None and rank.preflight is not None and rank.preflight.outcome == "victim":
        return f"is a victim: {rank.preflight.detail or f'it waited in stage {rank.preflight.stage}'}"
    return f"is a victim of what failed in stage {first.stage}"


def _of_outcomes(facts: RunFacts, ranks: list[RankFacts]) -> Verdict:
    """The ranks reached no common conclusion: only each rank's own result is known."""
    guilty = [rank for rank in ranks if rank.preflight is not None and rank.preflight.outcome == "failed"]
    victims = [rank for rank in ranks if rank.preflight is not None and rank.preflight.outcome == "victim"]
    cascade = [CascadedRank(rank.rank, _outcome_text(rank)) for rank in victims]
    evidence = [f"rank {rank.rank} on {facts.host(rank)}: {_outcome_text(rank)}" for rank in [*guilty, *victims]]
    if not guilty:
        return Verdict(
            kind=VerdictKind.PREFLIGHT,
            statement="The preflight failed; each rank that failed was waiting for another: nobody is to blame.",
            certainty=Certainty.UNKNOWN,
            attempt=facts.last_attempt,
            evidence=evidence[:_MAX_LINES],
            next=["Run it again with --nccl-debug, and look at the rank that is missing from the evidence."],
            cascade=cascade,
        )
    guilty.sort(key=lambda rank: (stage_order(rank.preflight.stage if rank.preflight else ""), rank.rank))
    first = guilty[0]
    assert first.preflight is not None
    others = f" (and {ranks_text([rank.rank for rank in guilty[1:]])})" if guilty[1:] else ""
    host = facts.host(first)
    return Verdict(
        kind=VerdictKind.PREFLIGHT,
        statement=(
            f"Preflight, stage {first.preflight.stage}: rank {first.rank}{others} on {host} failed: "
            f"{first.preflight.detail.rstrip('. ')}."
        ),
        certainty=Certainty.ESTABLISHED,
        rank=first.rank,
        host=host,
        device=first.preflight.device or None,
        attempt=first.attempt,
        stage=first.preflight.stage,
        evidence=evidence[:_MAX_LINES],
        next=[f"Look at {host}, local rank {local_rank_of(first)}, or leave that node out of the next run."],
        cascade=cascade,
    )


def _outcome_text(rank: RankFacts) -> str:
    assert rank.preflight is not None
    return f"{rank.preflight.outcome} in stage {rank.preflight.stage}: {rank.preflight.detail}"


def _line(finding: PreflightFinding) -> str:
    return f"{finding.stage}, {finding.grade}: {finding.sentence}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _names(names: list[str]) -> str:
    return ", ".join(names[:_MAX_LINES]) + (f" and {len(names) - _MAX_LINES} more" if len(names) > _MAX_LINES else "")
