"""The conclusion of one step, from the reports of all ranks. Pure: any rank that has the reports can draw it.

An error of gpuwatch's own test fails no job: it ends the preflight with a finding of grade `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from ....core.preflight import Finding
from ....core.text.ranks_text import ranks_text
from ..lines import RankOutcome
from ..meeting import LEADER
from ..reports import Conclusion, PairTried, Report, Roster
from ..steps import Mode, is_local, stage_of, stays_local, step_after
from . import pairwise_search as blaming
from .attendance import missing_findings, roster_of
from .consistency import compare
from .group_verdict import judge_group, rank_failed
from .link_speeds import below, slow_links, slowest
from .odd_ones import odd_digests, slow_devices

_REPORT_IT = "Please report it, with this line."


@dataclass(frozen=True)
class Terms:
    """The settings of a preflight, which do not change."""

    mode: Mode
    world_size: int
    timeout_s: float
    """Time for the ranks to arrive."""
    slow_factor: float = 1.5
    min_busbw: float = 0.0
    node_hosts: tuple[str, ...] = ()
    """The hosts of all nodes in their order; () if they are unknown."""


@dataclass(frozen=True)
class Heard:
    """The reports of one step, and the ranks without one."""

    step: str
    reports: Mapping[int, Report]
    silent: list[int]
    leader_failed: bool = False


def conclude_softly(terms: Terms, heard: Heard, before: Conclusion, roster: Roster | None) -> Conclusion:
    """As `conclude`. An error of gpuwatch ends the preflight and not the job."""
    try:
        return conclude(terms, heard, before, roster)
    except Exception as error:
        sentence = f"no conclusion could be drawn, an error of gpuwatch: {type(error).__name__}: {error}"
        finding = Finding(stage_of(heard.step), "unknown", "job", [], [], sentence, _REPORT_IT)
        arrived = before.arrived or len(heard.reports)
        return Conclusion(findings=[*before.findings, finding], outcomes=before.outcomes, arrived=arrived)


def conclude(terms: Terms, heard: Heard, before: Conclusion, roster: Roster | None) -> Conclusion:
    """The conclusion of a step. `before`: that of the previous step. `roster`: None until all ranks have arrived."""
    now = Conclusion(findings=before.findings, outcomes=before.outcomes, arrived=before.arrived, broken=before.broken)
    if heard.step == "arrive":
        now = _attendance(terms, heard, now)
        roster = now.roster
    else:
        now = _silent(heard, now, roster)
    now = _fallen(heard, now, roster)
    now = _blame(now, [finding for report in heard.reports.values() for finding in report.findings])
    foreign = [report.detail for report in heard.reports.values() if report.kind == "foreign"]
    if foreign:
        return _blame(now, [foreign_finding(heard.step, foreign[0])])
    faults = {rank: report.detail for rank, report in heard.reports.items() if report.kind == "fault"}
    if faults:
        return _faults(heard, now, faults, roster)
    if roster is None or heard.silent or _went_away(heard):
        return now
    if heard.step == "consistency":
        facts = {rank: report.facts for rank, report in heard.reports.items() if report.facts is not None}
        now = _blame(now, _softly(heard.step, lambda: compare(facts)))
    if heard.step == "compute":
        now = _blame(now, _softly(heard.step, lambda: _of_compute(terms, heard, roster)))
    if heard.step == "bandwidth":
        now = _blame(now, _softly(heard.step, lambda: _of_bandwidth(terms, heard, roster)))
    if is_local(heard.step):
        now = _of_each_rank(heard, now, roster)
        following = step_after(heard.step, terms.mode, len(roster.ranks_by_node))
        if now.failed and not stays_local(heard.step, following):
            return now
        return replace(now, next=following)
    if heard.step == "arrive":
        return replace(now, next="consistency")
    return _of_groups(terms, heard, before, now, roster)


# -- arrival ------------------------------------------------------------------------------------------------------


def _attendance(terms: Terms, heard: Heard, now: Conclusion) -> Conclusion:
    present = {rank: report.attendance for rank, report in heard.reports.items() if report.attendance is not None}
    now = replace(now, arrived=len(heard.reports))
    if heard.leader_failed and not heard.silent:
        now = _no_conclusion(heard, now, present[LEADER].host if LEADER in present else "")
    if heard.silent:
        found = missing_findings(heard.silent, present, terms.world_size, terms.node_hosts, terms.timeout_s)
        now = _blame(now, found)
        waited = f"waited for {ranks_text(heard.silent)}"
        return _victims(now, dict.fromkeys(present, waited), "arrive")
    if len(present) == terms.world_size:
        roster = roster_of(present, terms.world_size)
        nodes = len(roster.ranks_by_node)
        note = f"{terms.world_size} rank{'s' * (terms.world_size > 1)} on {nodes} node{'s' * (nodes > 1)}"
        return replace(now, roster=roster, note=note)
    return now


def _silent(heard: Heard, now: Conclusion, roster: Roster | None) -> Conclusion:
    """Ranks that arrived and then sent no report: if the worker has ended, no process is left to report it."""
    if heard.leader_failed and not heard.silent:  # else the leader may be waiting for the silent ranks
        return _no_conclusion(heard, now, roster.hosts[LEADER] if roster else "")
    if not heard.silent or roster is None:
        return now
    stage = stage_of(heard.step)
    findings = [
        Finding(
            stage=stage,
            grade="fail",
            subject="node" if roster.ranks_of(node) == ranks and len(roster.ranks_by_node) > 1 else "rank",
            ranks=ranks,
            hosts=[roster.hosts[ranks[0]]],
            sentence=f"{ranks_text(ranks)} ({roster.hosts[ranks[0]]}) gave no more word in stage {stage}",
            next=f"Look at {roster.hosts[ranks[0]]}: is it up, and what ended the ranks there?",
            victims=sorted(heard.reports),
        )
        for node in roster.ranks_by_node
        if (ranks := [rank for rank in heard.silent if roster.nodes[rank] == node])
    ]
    waited = f"waited for {ranks_text(heard.silent)}"
    return _victims(_blame(now, findings), dict.fromkeys(heard.reports, waited), stage)


def _no_conclusion(heard: Heard, now: Conclusion, host: str) -> Conclusion:
    stage, victims = stage_of(heard.step), [rank for rank in heard.reports if rank != LEADER]
    next_ = f"Look at {host or 'its host'}: what ended or stopped the processes of rank {LEADER} there?"
    return _blame(now, [rank_failed(stage, LEADER, host, f"gave no conclusion in stage {stage}", next_, victims)])


def _fallen(heard: Heard, now: Conclusion, roster: Roster | None) -> Conclusion:
    """Ranks whose coordinator died or hung, as reported by their workers."""
    fallen = {rank: report for rank, report in heard.reports.items() if report.kind == "fallen"}
    if not fallen:
        return now
    others = sorted(set(heard.reports) - set(fallen))
    findings = []
    for rank, report in sorted(fallen.items()):
        host = roster.hosts[rank] if roster else report.attendance.host if report.attendance else ""
        stage = report.said or stage_of(heard.step)
        findings.append(rank_failed(stage, rank, host, report.detail, report.next, others))
    waited = f"waited for {ranks_text(fallen)}"
    return _victims(_blame(now, findings), dict.fromkeys(others, waited), stage_of(heard.step))


def _went_away(heard: Heard) -> bool:
    return heard.leader_failed or any(report.kind == "fallen" for report in heard.reports.values())


# -- each rank's own test ------------------------------------------------------------------------------------------


def _faults(heard: Heard, now: Conclusion, faults: Mapping[int, str], roster: Roster | None) -> Conclusion:
    """The preflight ends here: the test itself is broken, so the failures of other ranks mean nothing."""
    first = min(faults)
    finding = Finding(
        stage=stage_of(heard.step),
        grade="unknown",
        subject="job",
        ranks=sorted(faults),
        hosts=sorted({roster.hosts[rank] for rank in faults}) if roster else [],
        sentence=f"the test itself failed on {ranks_text(faults)}, an error of gpuwatch: {faults[first]}",
        next=_REPORT_IT,
    )
    return _blame(now, [finding])


def foreign_finding(step: str, sentence: str) -> Finding:
    """Somebody else has written into the ranks' store: the preflight ends here, and accuses nobody of the job."""
    next_ = "Look at who can reach the port at which the ranks meet: whoever can may write there."
    return Finding(stage_of(step), "unknown", "job", [], [], f"the preflight has ended: {sentence}", next_)


def _softly(step: str, find: Callable[[], list[Finding]]) -> list[Finding]:
    """An error in a comparison becomes a finding and does not end the preflight."""
    try:
        return find()
    except Exception as error:
        sentence = f"what the ranks found could not be compared, an error of gpuwatch: {type(error).__name__}: {error}"
        return [Finding(stage_of(step), "unknown", "job", [], [], sentence, _REPORT_IT)]


def _of_compute(terms: Terms, heard: Heard, roster: Roster) -> list[Finding]:
    results = {rank: report.computed for rank, report in heard.reports.items() if report.computed is not None}
    hosts = roster.hosts_by_rank
    return [*odd_digests(results, hosts), *slow_devices(results, hosts, terms.slow_factor)]


def _of_bandwidth(terms: Terms, heard: Heard, roster: Roster) -> list[Finding]:
    measured = {rank: report.measured for rank, report in heard.reports.items() if report.measured is not None}
    if len(measured) < terms.world_size or not slowest(measured):
        return []
    found = below(measured, roster.hosts_by_rank, terms.min_busbw)
    return [*([found] if found else []), *slow_links(measured, roster.hosts_by_rank)]


def _of_each_rank(heard: Heard, now: Conclusion, roster: Roster) -> Conclusion:
    """Findings of ranks whose own part failed, one per rank."""
    findings = []
    for rank, report in sorted(heard.reports.items()):
        if report.kind in ("raised", "died", "hung"):
            verb = {"raised": "failed: ", "died": "died: ", "hung": ""}[report.kind]
            said, stage = f"{verb}{report.detail}", stage_of(heard.step)
            findings.append(rank_failed(stage, rank, roster.hosts[rank], said, report.next))
    return _blame(now, findings)


# -- process groups ----------------------------------------------------------------------------------------------------


def _of_groups(terms: Terms, heard: Heard, before: Conclusion, now: Conclusion, roster: Roster) -> Conclusion:
    stage = stage_of(heard.step)
    nodes = roster.ranks_by_node
    if heard.step in ("node group", "inside"):
        now = _inside_nodes(stage, heard, now, roster)
    elif heard.step.startswith("pairs "):
        return _of_pairs(heard, before, now, roster)
    else:
        judgement = judge_group(stage, heard.reports, roster.hosts_by_rank, one_node=len(nodes) == 1)
        if judgement.failed:
            now = _blame(now, judgement.findings)
            now = _victims(now, judgement.victims, stage)
            if not judgement.findings:
                return _search(terms, heard, now, roster, judgement.detail)
    if now.failed:
        return now
    if heard.step == "inside":  # the group of each node works
        return _try_pairs(now, roster, [], 1)
    return replace(now, next=step_after(heard.step, terms.mode, len(nodes)))


def _inside_nodes(stage: str, heard: Heard, now: Conclusion, roster: Roster) -> Conclusion:
    hosts = roster.hosts_by_rank
    for node, ranks in roster.ranks_by_node.items():
        judgement = judge_group(stage, {rank: heard.reports[rank] for rank in ranks}, hosts, one_node=True)
        if not judgement.failed:
            continue
        findings = judgement.findings or [_of_node(stage, node, ranks, roster, judgement.detail)]
        now = _victims(_blame(now, findings), judgement.victims, stage)
    return now


def _of_node(stage: str, node: int, ranks: list[int], roster: Roster, detail: str) -> Finding:
    host = roster.hosts_by_node[node]
    return Finding(
        stage=stage,
        grade="fail",
        subject="node",
        ranks=[],
        hosts=[host],
        sentence=(
            f"{ranks_text(ranks)} inside node {host} do not work together, at whose fault is not known: {detail}"
        ),
        next=f"Run `gpuwatch check --nnodes 1 --nccl-debug` on {host} alone, with fewer ranks, and read the log.",
        victims=ranks,
    )


def _search(terms: Terms, heard: Heard, now: Conclusion, roster: Roster, detail: str) -> Conclusion:
    """The group failed, and the ranks' reports blame nobody."""
    if heard.step == "bandwidth" or len(roster.ranks_by_node) == 1:
        where = f"inside node {roster.hosts[0]}" if len(roster.ranks_by_node) == 1 else "over all ranks"
        finding = Finding(
            stage=stage_of(heard.step),
            grade="fail",
            subject="job",
            ranks=[],
            hosts=[],
            sentence=f"the process group {where} failed, at which rank is not known: {detail}",
            next="Run `gpuwatch check --nccl-debug` and read the log.",
            victims=sorted(heard.reports),
        )
        return _blame(now, [finding])
    now = replace(now, broken=detail)
    if terms.mode == "quick":
        return replace(now, next="inside")
    return _try_pairs(now, roster, [], 1)


def _try_pairs(now: Conclusion, roster: Roster, tried: list[PairTried], number: int) -> Conclusion:
    """The next round of pairs, or the verdict when no pair is left to try."""
    nodes = roster.ranks_by_node
    results = [blaming.PairResult(one.a, one.b, one.ok, one.detail) for one in tried]
    pairs = blaming.next_pairs(results, list(nodes)) if number <= blaming.ROUNDS else []
    if pairs:
        return replace(now, next=f"pairs {number}", pairs=pairs, tried=tried)
    findings = blaming.blame(results, nodes, roster.hosts_by_node)
    return _blame(now, findings)


def _of_pairs(heard: Heard, before: Conclusion, now: Conclusion, roster: Roster) -> Conclusion:
    tried = list(before.tried)
    for a, b in before.pairs:
        ranks = roster.ranks_of(a, b)
        judgement = judge_group("cross group", {rank: heard.reports[rank] for rank in ranks}, roster.hosts_by_rank)
        tried.append(PairTried(a, b, not judgement.failed, judgement.detail))
        now = _blame(now, judgement.findings)
    if now.failed:
        return now
    return _try_pairs(now, roster, tried, int(heard.step.removeprefix("pairs ")) + 1)


# -- totals ---------------------------------------------------------------------------------------------------------


def _blame(now: Conclusion, findings: Collection[Finding]) -> Conclusion:
    """`now` with these findings. A finding of grade fail makes its ranks failed."""
    outcomes = {outcome.rank: outcome for outcome in now.outcomes}
    for finding in findings:
        if finding.grade != "fail":
            continue
        for rank in finding.victims:
            outcomes.setdefault(rank, RankOutcome(rank, "victim", finding.stage, finding.sentence))
        if finding.subject in ("rank", "gpu", "node"):
            for rank in finding.ranks:
                if rank not in outcomes or outcomes[rank].standing == "victim":
                    outcomes[rank] = RankOutcome(rank, "failed", finding.stage, finding.sentence)
    return replace(now, findings=[*now.findings, *findings], outcomes=[outcomes[rank] for rank in sorted(outcomes)])


def _victims(now: Conclusion, victims: Mapping[int, str], stage: str) -> Conclusion:
    """Ranks that failed only because of others, with their reports."""
    outcomes = {outcome.rank: outcome for outcome in now.outcomes}
    for rank, detail in victims.items():
        if rank not in outcomes or outcomes[rank].standing == "victim":
            outcomes[rank] = RankOutcome(rank, "victim", stage, detail)
    return replace(now, outcomes=[outcomes[rank] for rank in sorted(outcomes)])
