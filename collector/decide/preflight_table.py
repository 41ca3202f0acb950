"""The preflight of all ranks in one table: a row per node, a column per stage. Part of report.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...core.preflight import STAGES, PreflightFinding
from ..report.model import GRADES, BandwidthSize, NodeRow, PreflightReport, RankInventory, StageCell, StageColumn

if TYPE_CHECKING:
    from ..facts.facts import RankFacts, RunFacts


def preflight_report(facts: RunFacts, attempt: int) -> PreflightReport:
    """What the preflight of one attempt has found."""
    ranks = facts.of_attempt(attempt)
    findings = findings_of(ranks)
    nodes = _nodes(facts, ranks, findings)
    return PreflightReport(
        outcome=_outcome(ranks),
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


def _outcome(ranks: list[RankFacts]) -> str:
    outcomes = {rank.preflight.outcome if rank.preflight is not None else "off" for rank in ranks}
    for found in ("failed", "victim", "skipped", "off", "ok"):
        if found in outcomes:
            return found
    return "off"


def _nodes(facts: RunFacts, ranks: list[RankFacts], findings: list[PreflightFinding]) -> list[NodeRow]:
    blamed = _blamed(findings, {rank.rank for rank in ranks})
    victims = {(finding.stage, rank) for finding in findings for rank in finding.victims} - set(blamed)
    rows = []
    for node in facts.nodes.values():
        mine = [rank for rank in ranks if rank.agent == node.agent]
        if not mine and node.hello is None:
            continue
        stages = {
            stage: cell for stage in _reached(mine, blamed) if (cell := _cell(stage, mine, blamed, victims)) is not None
        }
        rows.append(
            NodeRow(
                host=node.hello.host if node.hello is not None else "",
                ranks=[rank.rank for rank in mine],
                grade=worst(cell.grade for cell in stages.values()),
                stages=stages,
            )
        )
    return sorted(rows, key=lambda row: (row.ranks or [1 << 30], row.host))


def _blamed(findings: list[PreflightFinding], everyone: set[int]) -> dict[tuple[str, int], PreflightFinding]:
    """(stage, rank) -> the finding that blames it. A finding about the whole job blames all ranks."""
    found: dict[tuple[str, int], PreflightFinding] = {}
    for finding in findings:
        for rank in finding.ranks or everyone:
            found.setdefault((finding.stage, rank), finding)
    return found


def _reached(ranks: list[RankFacts], blamed: dict[tuple[str, int], PreflightFinding]) -> list[str]:
    stages = {event.stage for rank in ranks for event in rank.begun}
    stages |= {event.stage for rank in ranks for event in rank.stages}
    stages |= {stage for stage, number in blamed if any(rank.rank == number for rank in ranks)}
    return sorted(stages, key=stage_order)


def _cell(
    stage: str, ranks: list[RankFacts], blamed: dict[tuple[str, int], PreflightFinding], victims: set[tuple[str, int]]
) -> StageCell | None:
    """The worst of a node's ranks, and the time of the slowest."""
    graded = []
    for member in ranks:
        key = (stage, member.rank)
        found = _grade(stage, member, blamed.get(key), key in victims)
        if found is not None:
            graded.append((found[0], member.rank, found[1]))
    if not graded:
        return None
    grade = worst(found for found, _, _ in graded)
    times = {rank.rank: event.seconds for rank in ranks for event in rank.stages if event.stage == stage}
    slowest = max(times, key=lambda rank: (times[rank], -rank), default=None)
    rank, detail = next((rank, detail) for found, rank, detail in graded if found == grade)
    if grade == "ok" and slowest is not None:
        rank, detail = next((rank, detail) for _, rank, detail in graded if rank == slowest)
    return StageCell(
        grade=grade,
        ranks=len(times),
        seconds=times[slowest] if slowest is not None else 0.0,
        rank=rank,
        detail=detail,
    )


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
        columns.append(
            StageColumn(
                stage=stage,
                grade=worst(found.grade for _, found in cells),
                ranks=sum(found.ranks for _, found in cells),
                seconds=cell.seconds,
                rank=cell.rank,
                host=slowest.host,
            )
        )
    return columns


def _bandwidth(facts: RunFacts, ranks: list[RankFacts]) -> list[BandwidthSize]:
    found: dict[int, list[tuple[RankFacts, float, float, float]]] = {}
    for rank in ranks:
        for row in rank.bandwidth.rows if rank.bandwidth is not None else []:
            found.setdefault(row.size_bytes, []).append((rank, row.time_us, row.algbw_gbs, row.busbw_gbs))
    sizes = []
    for size, rows in sorted(found.items()):
        rank, time_us, algbw, busbw = min(rows, key=lambda row: (row[3], row[0].rank))
        best = max(row[3] for row in rows)
        sizes.append(BandwidthSize(size, len(rows), time_us, algbw, busbw, rank.rank, facts.host(rank), best))
    return sizes
