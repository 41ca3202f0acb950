"""What the preflight of all ranks has found: a table with a row per node and a column per stage, and the verdict of a
run that it stopped, or of a check."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.codes import Certainty, Code, VerdictKind, coded
from ...core.preflight import STAGES, PreflightFinding
from ...core.text import ranks_text
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..report.preflight_table import (
    GRADES,
    BandwidthSize,
    NodeRow,
    PreflightReport,
    RankInventory,
    StageCell,
    StageColumn,
)
from ..report.sentence_parts import counted, grouped
from ..report.verdict import CascadedRank, Verdict
from .checked_nodes import checked_nodes

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
    return _of_silence(facts, _silent(facts, ranks))


def check_verdict(facts: RunFacts) -> Verdict | None:
    """The verdict of a check that nothing stopped: all stages passed, or a rank was never heard."""
    if not facts.check_only:
        return None
    ranks = facts.of_attempt(facts.last_attempt)
    silent = _silent(facts, ranks)
    if silent:
        return _of_silence(facts, silent)
    if not all(node.went_well for node in facts.nodes.values()):
        return None
    findings = findings_of(ranks)
    warned = sum(finding.grade == "warn" for finding in findings)
    unknown = sum(finding.grade == "unknown" for finding in findings)
    noted = [*([counted(warned, "warning")] if warned else []), *([f"{unknown} unknown"] if unknown else [])]
    nodes = len({rank.agent for rank in ranks})
    seconds = max((seconds_of(rank) for rank in ranks), default=0.0)
    where = f"{counted(len(ranks), 'rank')} on {counted(nodes, 'node')} in {seconds:.1f} s"
    return Verdict(
        VerdictKind.CLEAN,
        f"Preflight passed: {where}{', with ' + ' and '.join(noted) if noted else ''}.",
        Certainty.ESTABLISHED,
        attempt=facts.last_attempt,
        evidence=[
            *checked_nodes(facts, ranks, findings)[:_MAX_LINES],
            *(finding_line(finding) for finding in findings[:_MAX_LINES]),
        ],
        next=list(dict.fromkeys(finding.next for finding in findings if finding.next))[:_MAX_LINES],
    )


def _of_silence(facts: RunFacts, silent: str) -> Verdict:
    missing = _nodes_missing(facts)
    names = sorted(node.name for node in facts.nodes.values())
    more = len(names) - _MAX_LINES
    return Verdict(
        VerdictKind.PREFLIGHT,
        f"Preflight: {silent or 'it was stopped, and no rank said why'}.",
        Certainty.ESTABLISHED if missing else Certainty.UNKNOWN,
        attempt=facts.last_attempt,
        stage="arrive" if missing else None,
        evidence=[f"heard from: {', '.join(names[:_MAX_LINES])}{f' and {more} more' if more > 0 else ''}"],
        cause_code=Code.NOT_ARRIVED if missing else Code.RANK_SILENT,
        next=["Check whether it was started on every node with the same options, and what it printed there."],
    )


def _silent(facts: RunFacts, ranks: list[RankFacts]) -> str:
    """Nodes and ranks without a result, in words; "" if there are none."""
    missing = _nodes_missing(facts)
    if missing:
        expected = max(hello.min_nodes for hello in facts.hellos)
        return f"{missing} of {expected} nodes did not arrive"
    without = [rank.rank for rank in ranks if rank.preflight is None or rank.preflight.outcome == "skipped"]
    expected = sum(hello.nproc for hello in facts.hellos)
    if without:
        why = next((f" ({rank.preflight.detail})" for rank in ranks if rank.preflight and rank.preflight.detail), "")
        return f"{ranks_text(without)} gave no result{why}"
    if len(ranks) < expected:
        return f"{counted(expected - len(ranks), 'rank')} of {expected} never started"
    return ""


def _nodes_missing(facts: RunFacts) -> int:
    return max(0, max((hello.min_nodes for hello in facts.hellos), default=0) - len(facts.hellos))


def _of_findings(facts: RunFacts, ranks: list[RankFacts], failures: list[PreflightFinding]) -> Verdict:
    """The first failed stage gives the reason. Later failures may be its consequence, so they are evidence."""
    first = failures[0]
    same = [finding for finding in failures[1:] if finding.stage == first.stage]
    later = [finding for finding in failures[1:] if finding.stage != first.stage]
    guilty = {rank for finding in failures if finding.subject != "job" for rank in finding.ranks}
    victims = {rank for finding in failures for rank in finding.victims} - guilty
    victims |= {r.rank for r in ranks if r.preflight is not None and r.preflight.outcome == "victim"} - guilty
    alone = first.ranks[0] if first.subject in ("rank", "gpu") and len(first.ranks) == 1 else None
    known = facts.named(facts.last_attempt, alone)
    named = first.subject in ("rank", "gpu", "node")
    more = f" And {counted(len(same), 'other finding')} in the same stage." if same else ""
    return Verdict(
        VerdictKind.PREFLIGHT,
        f"Preflight, stage {first.stage}: {first.sentence.rstrip('. ')}.{more}",
        _CERTAINTY.get(first.subject, Certainty.UNKNOWN),
        rank=alone,
        host=first.hosts[0] if named and len(first.hosts) == 1 else None,
        device=first.device or (known.preflight.device or None if known is not None and known.preflight else None),
        attempt=facts.last_attempt,
        stage=first.stage,
        evidence=[
            *(finding_line(finding) for finding in same[:_MAX_LINES]),
            *(coded(f"later, in stage {one.stage}: {one.sentence}", one.code) for one in later[:_MAX_LINES]),
            *_told_by(facts, ranks, first),
            *_witnesses(ranks, first),
        ],
        next=list(dict.fromkeys(finding.next for finding in [first, *same, *later] if finding.next))[:_MAX_LINES],
        cascade=[CascadedRank(rank, _victim_text(facts, rank, first)) for rank in sorted(victims)],
        cause_code=first.code,
    )


def _told_by(facts: RunFacts, ranks: list[RankFacts], first: PreflightFinding) -> list[str]:
    """The blamed ranks' own reports."""
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
    stuck = [rank.rank for rank in ranks if rank.unfinished_stage == first.stage]
    lines = [f"{ranks_text(passed)} passed stage {first.stage}"] if passed else []
    return [*lines, f"{ranks_text(stuck)} did not finish it"] if stuck else lines


def _victim_text(facts: RunFacts, number: int, first: PreflightFinding) -> str:
    rank = facts.named(facts.last_attempt, number)
    if rank is not None and rank.preflight is not None and rank.preflight.outcome == "victim":
        return f"is a victim: {rank.preflight.detail or f'it waited in stage {rank.preflight.stage}'}"
    return f"is a victim of what failed in stage {first.stage}"


def _of_outcomes(facts: RunFacts, ranks: list[RankFacts]) -> Verdict:
    """The ranks reached no common conclusion: only each rank's own result is known."""
    by_outcome = grouped(ranks, lambda rank: rank.preflight.outcome if rank.preflight is not None else "")
    guilty, victims = by_outcome.get("failed", []), by_outcome.get("victim", [])
    cascade = [CascadedRank(rank.rank, _outcome_text(rank)) for rank in victims]
    evidence = [f"rank {rank.rank} on {facts.host(rank)}: {_outcome_text(rank)}" for rank in [*guilty, *victims]]
    if not guilty:
        return Verdict(
            VerdictKind.PREFLIGHT,
            "The preflight failed; each rank that failed was waiting for another: nobody is to blame.",
            Certainty.UNKNOWN,
            attempt=facts.last_attempt,
            evidence=evidence[:_MAX_LINES],
            next=["Run it again with --nccl-debug, and look at the rank that is missing from the evidence."],
            cascade=cascade,
            cause_code=Code.GROUP_UNDECIDED,
        )
    guilty.sort(key=lambda rank: (stage_order(rank.preflight.stage if rank.preflight else ""), rank.rank))
    first = guilty[0]
    assert first.preflight is not None
    others = f" (and {ranks_text([rank.rank for rank in guilty[1:]])})" if guilty[1:] else ""
    local = first.state.local_rank if first.state is not None else "?"
    host, why = facts.host(first), first.preflight.detail.rstrip(". ")
    return Verdict(
        VerdictKind.PREFLIGHT,
        f"Preflight, stage {first.preflight.stage}: rank {first.rank}{others} on {host} failed: {why}.",
        Certainty.ESTABLISHED,
        rank=first.rank,
        host=host,
        device=first.preflight.device or None,
        attempt=first.attempt,
        stage=first.preflight.stage,
        evidence=evidence[:_MAX_LINES],
        next=[f"Look at {host}, local rank {local}, or leave that node out of the next run."],
        cascade=cascade,
        cause_code=Code.RANK_TEST_FAILED,
    )


def _outcome_text(rank: RankFacts) -> str:
    assert rank.preflight is not None
    return f"{rank.preflight.outcome} in stage {rank.preflight.stage}: {rank.preflight.detail}"


def finding_line(finding: PreflightFinding) -> str:
    """`compute, fail: rank 1 on vm gets a different matmul result [GW334]`"""
    return coded(f"{finding.stage}, {finding.grade}: {finding.sentence}", finding.code)


# The table, which is part of report.json.


def preflight_report(facts: RunFacts, attempt: int) -> PreflightReport:
    """What the preflight of one attempt has found."""
    ranks = facts.of_attempt(attempt)
    findings = findings_of(ranks)
    nodes = _nodes(facts, ranks, findings)
    outcomes = {rank.preflight.outcome if rank.preflight is not None else "off" for rank in ranks}
    return PreflightReport(
        outcome=next((found for found in ("failed", "victim", "skipped", "off", "ok") if found in outcomes), "off"),
        seconds=round(max((seconds_of(rank) for rank in ranks), default=0.0), 3),
        stages=_columns(nodes),
        nodes=nodes,
        findings=findings,
        bandwidth=_bandwidth(facts, ranks),
        inventory=[
            RankInventory(rank.rank, rank.inventory.facts)
            for rank in ranks
            if rank.inventory is not None and rank.inventory.facts is not None
        ],
    )


def findings_of(ranks: Iterable[RankFacts]) -> list[PreflightFinding]:
    """Every finding once, though each rank reports it: the worst first, then in the order of the stages."""
    found: list[PreflightFinding] = []
    for rank in ranks:
        if rank.preflight is not None:
            found += [f for f in rank.preflight.findings if f.grade != "ok" and f not in found]
    return sorted(found, key=lambda f: (-GRADES.index(f.grade), stage_order(f.stage), f.ranks, f.sentence))


def seconds_of(rank: RankFacts) -> float:
    """All stages of a rank together."""
    return sum((stage.seconds for stage in rank.stages), 0.0)


def stage_order(stage: str) -> int:
    """A stage's place in the order. An unknown stage comes last."""
    return STAGES.index(stage) if stage in STAGES else len(STAGES)


def worst(grades: Iterable[str]) -> str:
    """The worst of some grades; "" of none."""
    return max((grade for grade in grades if grade), key=GRADES.index, default="")


def _nodes(facts: RunFacts, ranks: list[RankFacts], findings: list[PreflightFinding]) -> list[NodeRow]:
    everyone = [rank.rank for rank in ranks]
    # by stage and rank, the first finding that blames it; one about the whole job blames all ranks
    blamed = {(found.stage, rank): found for found in reversed(findings) for rank in found.ranks or everyone}
    victims = {(finding.stage, rank) for finding in findings for rank in finding.victims} - set(blamed)
    rows = []
    for node in facts.nodes.values():
        mine = [rank for rank in ranks if rank.agent == node.agent]
        if not mine and node.hello is None:
            continue
        found = ((stage, _cell(stage, mine, blamed, victims)) for stage in _reached(mine, blamed))
        stages = {stage: cell for stage, cell in found if cell is not None}
        grade = worst(cell.grade for cell in stages.values())
        rows.append(NodeRow(node.host, [rank.rank for rank in mine], grade, stages))
    return sorted(rows, key=lambda row: (row.ranks or [1 << 30], row.host))


def _reached(ranks: list[RankFacts], blamed: dict[tuple[str, int], PreflightFinding]) -> list[str]:
    stages = {event.stage for rank in ranks for event in rank.begun}
    stages |= {event.stage for rank in ranks for event in rank.stages}
    stages |= {stage for stage, number in blamed if any(rank.rank == number for rank in ranks)}
    return sorted(stages, key=stage_order)


def _cell(
    stage: str, ranks: list[RankFacts], blamed: dict[tuple[str, int], PreflightFinding], victims: set[tuple[str, int]]
) -> StageCell | None:
    """The worst of a node's ranks, and the time of the slowest."""
    keys = {rank.rank: (stage, rank.rank) for rank in ranks}
    found = {r.rank: _grade(stage, r, blamed.get(keys[r.rank]), keys[r.rank] in victims) for r in ranks}
    graded = {rank: grade_and_why for rank, grade_and_why in found.items() if grade_and_why is not None}
    if not graded:
        return None
    grade = worst(grade for grade, _ in graded.values())
    times = {rank.rank: event.seconds for rank in ranks for event in rank.stages if event.stage == stage}
    slowest = max(times, key=lambda rank: (times[rank], -rank), default=None)
    shown = next(rank for rank, (of_rank, _) in graded.items() if of_rank == grade)
    if grade == "ok" and slowest is not None:
        shown = slowest
    return StageCell(grade, len(times), times[slowest] if slowest is not None else 0.0, shown, graded[shown][1])


def _grade(stage: str, rank: RankFacts, finding: PreflightFinding | None, is_victim: bool) -> tuple[str, str] | None:
    """(grade, why) of one rank in a stage; None if it did not reach it. `finding` blames it, if one does."""
    ended = next((event for event in rank.stages if event.stage == stage), None)
    begun = any(event.stage == stage for event in rank.begun)
    if ended is None and not begun and finding is None:
        return None
    grade: str = ended.grade if ended is not None else "ok"
    detail = ended.detail if ended is not None else ""
    result = rank.preflight
    if ended is None and begun:
        grade, detail = "unknown", "not ended"
        if result is not None and result.stage == stage:
            grade, detail = {"failed": "fail", "victim": "victim"}.get(result.outcome, "unknown"), result.detail
    is_victim = is_victim or (result is not None and result.outcome == "victim" and finding is None)
    if is_victim and grade in ("fail", "unknown"):
        grade = "victim"
    if finding is not None and GRADES.index(finding.grade) > GRADES.index(grade):
        grade, detail = finding.grade, finding.sentence
    return grade, detail


def _columns(nodes: list[NodeRow]) -> list[StageColumn]:
    columns = []
    for stage in sorted({stage for node in nodes for stage in node.stages}, key=stage_order):
        cells = [(node, node.stages[stage]) for node in nodes if stage in node.stages]
        slowest, cell = max(cells, key=lambda pair: pair[1].seconds)
        grade, ranks = worst(found.grade for _, found in cells), sum(found.ranks for _, found in cells)
        columns.append(StageColumn(stage, grade, ranks, cell.seconds, cell.rank, slowest.host))
    return columns


def _bandwidth(facts: RunFacts, ranks: list[RankFacts]) -> list[BandwidthSize]:
    found = ((rank, row) for rank in ranks if rank.bandwidth is not None for row in rank.bandwidth.rows)
    sizes = []
    for size, rows in sorted(grouped(found, lambda pair: pair[1].size_bytes).items()):
        rank, row = min(rows, key=lambda pair: (pair[1].busbw_gbs, pair[0].rank))
        best, place = max(each.busbw_gbs for _, each in rows), (rank.rank, facts.host(rank))
        sizes.append(BandwidthSize(size, len(rows), row.time_us, row.algbw_gbs, row.busbw_gbs, *place, best))
    return sizes
