"""The conclusion of one step, from the reports of all ranks. Pure: any rank that has the reports can draw it.

An error of gpuwatch's own test fails no job: it ends the preflight with a finding of grade `unknown`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from msgspec.structs import replace

from ....core.codes import Code
from ....core.events.preflight_events import RankOutcome
from ....core.preflight import PreflightFinding, Subject
from ....core.settings import WorkerSettings
from ....core.text import ranks_text
from ..meeting import LEADER
from ..steps import (
    PairResult,
    RankAttendance,
    RankRoster,
    RankStepReport,
    StepConclusion,
    is_local,
    is_of_pairs,
    stage_of,
    step_after,
)
from . import pairs as blaming
from .consistency import compare
from .group_blame import failure, judge_group, rank_failed, undecided_inside
from .odd_ranks import below, odd_digests, slow_devices, slow_links, slowest

# Who has arrived, and who is missing: "ranks 9-15 (node gpu-017) did not arrive within 60 s". Pure.


def nodes_of(missing: Sequence[int], present: Mapping[int, RankAttendance], world_size: int) -> dict[int, int | None]:
    """The node of each missing rank, where it can be known.

    torchrun numbers the ranks node by node. So a rank that has arrived implies which other ranks are on its node. The
    ranks between two such blocks belong to the nodes between them, which are taken to be of equal size.
    """
    blocks = {one.node: (rank - one.local_rank, one.local_world_size) for rank, one in present.items()}
    size = max((size for _, size in blocks.values()), default=1)
    blocks_are_alike = all(block == (node * size, size) for node, block in blocks.items())
    if blocks and blocks_are_alike and world_size % size == 0:  # nearly always
        return {rank: rank // size for rank in missing}
    around = {rank: node for node, (first, size) in blocks.items() for rank in range(first, first + size)}
    return {rank: around.get(rank) for rank in missing}


def missing_findings(
    missing: Sequence[int],
    present: Mapping[int, RankAttendance],
    world_size: int,
    known_hosts: Sequence[str],
    timeout_s: float,
) -> list[PreflightFinding]:
    """One finding per node with missing ranks. `known_hosts`: the hosts of all nodes in their order, [] if unknown."""
    hosts = {one.node: one.host for one in present.values()}
    hosts = {**dict(enumerate(known_hosts)), **hosts}
    nodes = nodes_of(missing, present, world_size)
    groups: dict[int | None, list[int]] = {}
    for rank in missing:
        groups.setdefault(nodes[rank], []).append(rank)
    findings, victims = [], sorted(present)
    for node, ranks in groups.items():
        host = hosts.get(node, "") if node is not None else ""
        place = f" (node {host})" if host else f" (node number {node})" if node is not None else ""
        whole = node is not None and not any(one.node == node for one in present.values())
        sentence = f"{ranks_text(ranks)}{place} did not arrive within {timeout_s:.0f} s"
        next_ = (
            f"Look at {host or 'the node of these ranks'}: is it up, does torchrun run there, does it reach the "
            "others? If the ranks only start late, give them longer with --preflight-timeout SECONDS."
        )
        subject: Subject = "node" if whole else "rank"
        named = [host] if host else []
        findings.append(failure(Code.NOT_ARRIVED, "arrive", subject, ranks, named, sentence, next_, victims=victims))
    return findings


@dataclass(frozen=True)
class StepReports:
    """The reports of one step, and the ranks without one."""

    step: str
    reports: Mapping[int, RankStepReport]
    silent: list[int]
    leader_failed: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return len(self.reports) + len(self.silent)


def conclude_softly(
    settings: WorkerSettings, heard: StepReports, before: StepConclusion, roster: RankRoster | None
) -> StepConclusion:
    """As `conclude`. An error of gpuwatch ends the preflight and not the job."""
    try:
        return conclude(settings, heard, before, roster)
    except Exception as error:
        finding = _own_error(heard.step, "no conclusion could be drawn", error)
        arrived = before.arrived or len(heard.reports)
        return StepConclusion(findings=[*before.findings, finding], outcomes=before.outcomes, arrived=arrived)


def _own_error(step: str, what: str, error: Exception) -> PreflightFinding:
    return _fault(step, f"{what}, an error of gpuwatch: {type(error).__name__}: {error}")


def _fault(step: str, sentence: str, ranks: Sequence[int] = (), hosts: Sequence[str] = ()) -> PreflightFinding:
    next_, code = "Please report it, with this line.", Code.PREFLIGHT_FAULT
    return PreflightFinding(stage_of(step), "unknown", "job", [*ranks], [*hosts], sentence, next_, code=code)


def conclude(
    settings: WorkerSettings, heard: StepReports, before: StepConclusion, roster: RankRoster | None
) -> StepConclusion:
    """The conclusion of a step. `before`: that of the previous step. `roster`: None until all ranks have arrived."""
    now = StepConclusion(findings=before.findings, outcomes=before.outcomes, arrived=before.arrived, why=before.why)
    if heard.step == "arrive":
        now = _attendance(settings, heard, now)
        roster = now.roster
    else:
        now = _silent(heard, now, roster)
    now = _fallen(heard, now, roster)
    now = _blame(now, [finding for report in heard.reports.values() for finding in report.findings])
    foreign = [report.detail for report in heard.reports.values() if report.kind == "foreign"]
    if foreign:
        return _blame(now, [foreign_finding(heard.step, foreign[0])])
    faults = {rank: report.detail for rank, report in heard.reports.items() if report.kind == "fault"}
    if faults:  # the preflight ends here: the test itself is broken, so the failures of other ranks mean nothing
        hosts = sorted({roster.ranks[rank].host for rank in faults}) if roster else []
        first = faults[min(faults)]
        sentence = f"the test itself failed on {ranks_text(faults)}, an error of gpuwatch: {first}"
        return _blame(now, [_fault(heard.step, sentence, sorted(faults), hosts)])
    went_away = heard.leader_failed or any(report.kind == "fallen" for report in heard.reports.values())
    if roster is None or heard.silent or went_away:
        return now
    try:
        now = _blame(now, _compared(settings, heard, roster))
    except Exception as error:  # it does not end the preflight
        now = _blame(now, [_own_error(heard.step, "what the ranks found could not be compared", error)])
    if is_local(heard.step):
        for rank, report in sorted(heard.reports.items()):
            verb = {"raised": "failed: ", "died": "died: ", "hung": ""}.get(report.kind)
            if verb is not None:
                said, host = f"{verb}{report.detail}", roster.ranks[rank].host
                now = _blame(
                    now, [rank_failed(Code.RANK_TEST_FAILED, stage_of(heard.step), rank, host, said, report.next)]
                )
        following = step_after(heard.step, settings.preflight, len(roster.ranks_by_node))
        if now.failed and not is_local(following):
            return now
        return replace(now, next=following)
    if heard.step == "arrive":
        return replace(now, next="consistency")
    return _of_groups(settings, heard, before, now, roster)


# -- arrival ------------------------------------------------------------------------------------------------------


def _attendance(settings: WorkerSettings, heard: StepReports, now: StepConclusion) -> StepConclusion:
    present = {rank: report.attendance for rank, report in heard.reports.items() if report.attendance is not None}
    now = replace(now, arrived=len(heard.reports))
    if heard.leader_failed and not heard.silent:
        now = _no_conclusion(heard, now, present[LEADER].host if LEADER in present else "")
    if heard.silent:
        found = missing_findings(
            heard.silent, present, heard.world_size, settings.node_hosts, settings.preflight_timeout_s
        )
        return _blame(now, found, "arrive", dict.fromkeys(present, f"waited for {ranks_text(heard.silent)}"))
    if len(present) == heard.world_size:
        roster = RankRoster([present[rank] for rank in range(heard.world_size)])
        nodes = len(roster.ranks_by_node)
        note = f"{heard.world_size} rank{'s' * (heard.world_size > 1)} on {nodes} node{'s' * (nodes > 1)}"
        return replace(now, roster=roster, note=note)
    return now


def _silent(heard: StepReports, now: StepConclusion, roster: RankRoster | None) -> StepConclusion:
    """Ranks that arrived and then sent no report: if the worker has ended, no process is left to report it."""
    if heard.leader_failed and not heard.silent:  # else the leader may be waiting for the silent ranks
        return _no_conclusion(heard, now, roster.ranks[LEADER].host if roster else "")
    if not heard.silent or roster is None:
        return now
    stage = stage_of(heard.step)
    findings, silent = [], set(heard.silent)
    for node, of_node in roster.ranks_by_node.items():
        ranks, host = [rank for rank in of_node if rank in silent], roster.hosts_by_node[node]
        if ranks:
            subject: Subject = "node" if ranks == of_node and len(roster.ranks_by_node) > 1 else "rank"
            sentence = f"{ranks_text(ranks)} ({host}) stopped reporting in stage {stage}"
            next_ = f"Look at {host}: is it up, and what ended the ranks there?"
            findings.append(
                failure(Code.RANK_SILENT, stage, subject, ranks, [host], sentence, next_, victims=sorted(heard.reports))
            )
    return _blame(now, findings, stage, dict.fromkeys(heard.reports, f"waited for {ranks_text(heard.silent)}"))


def _no_conclusion(heard: StepReports, now: StepConclusion, host: str) -> StepConclusion:
    stage, victims = stage_of(heard.step), [rank for rank in heard.reports if rank != LEADER]
    next_ = f"Look at {host or 'its host'}: what ended or stopped the processes of rank {LEADER} there?"
    return _blame(
        now,
        [rank_failed(Code.RANK_SILENT, stage, LEADER, host, f"sent no conclusion in stage {stage}", next_, victims)],
    )


def _fallen(heard: StepReports, now: StepConclusion, roster: RankRoster | None) -> StepConclusion:
    """Ranks whose coordinator died or hung, as reported by their workers."""
    fallen = {rank: report for rank, report in heard.reports.items() if report.kind == "fallen"}
    if not fallen:
        return now
    others = sorted(set(heard.reports) - set(fallen))
    findings = []
    for rank, report in sorted(fallen.items()):
        here = roster.ranks[rank] if roster else report.attendance
        host = here.host if here else ""
        stage = report.said or stage_of(heard.step)
        findings.append(rank_failed(Code.RANK_SILENT, stage, rank, host, report.detail, report.next, others))
    waited = dict.fromkeys(others, f"waited for {ranks_text(fallen)}")
    return _blame(now, findings, stage_of(heard.step), waited)


# -- each rank's own test ------------------------------------------------------------------------------------------


def foreign_finding(step: str, sentence: str) -> PreflightFinding:
    """A stranger has written into the ranks' store: the preflight ends here, and blames no rank of the job."""
    next_ = "Check who can reach the port at which the ranks meet: anyone who can reach it can write there."
    return PreflightFinding(
        stage_of(step), "unknown", "job", [], [], f"the preflight has ended: {sentence}", next_, code=Code.FOREIGN_ENTRY
    )


def _compared(settings: WorkerSettings, heard: StepReports, roster: RankRoster) -> list[PreflightFinding]:
    """How the ranks differ, or how slow they are, in a step in which their results are compared."""
    hosts = roster.hosts_by_rank
    if heard.step == "consistency":
        return compare({rank: report.facts for rank, report in heard.reports.items() if report.facts is not None})
    if heard.step == "compute":
        results = {rank: report.computed for rank, report in heard.reports.items() if report.computed is not None}
        return [*odd_digests(results, hosts), *slow_devices(results, hosts, settings.slow_factor)]
    measured = {rank: report.measured for rank, report in heard.reports.items() if report.measured is not None}
    if heard.step != "bandwidth" or len(measured) < heard.world_size or not slowest(measured):
        return []
    found = below(measured, hosts, settings.min_busbw)
    return [*([found] if found else []), *slow_links(measured, hosts)]


# -- process groups ----------------------------------------------------------------------------------------------------


def _of_groups(
    settings: WorkerSettings, heard: StepReports, before: StepConclusion, now: StepConclusion, roster: RankRoster
) -> StepConclusion:
    stage = stage_of(heard.step)
    nodes = roster.ranks_by_node
    if heard.step in ("node group", "inside"):
        now = _inside_nodes(stage, heard, now, roster)
    elif is_of_pairs(heard.step):
        return _of_pairs(heard, before, now, roster)
    else:
        judgement = judge_group(stage, heard.reports, roster.hosts_by_rank, one_node=len(nodes) == 1)
        if judgement.failed:
            now = _blame(now, judgement.findings, stage, judgement.victims)
            if not judgement.findings:
                return _search(settings, heard, now, roster, judgement.detail)
    if now.failed or now.next:
        return now
    if heard.step == "inside":  # the group of each node works
        return _try_pairs("pairs", now, roster, [], 1)
    return replace(now, next=step_after(heard.step, settings.preflight, len(nodes)))


def _inside_nodes(stage: str, heard: StepReports, now: StepConclusion, roster: RankRoster) -> StepConclusion:
    hosts = roster.hosts_by_rank
    for node, ranks in roster.ranks_by_node.items():
        judgement = judge_group(stage, {rank: heard.reports[rank] for rank in ranks}, hosts, one_node=True)
        if not judgement.failed:
            continue
        if not judgement.findings and len(ranks) > 2 and len(roster.ranks_by_node) == 1:
            now = replace(_blame(now, [], stage, judgement.victims), why=judgement.detail)
            return _try_pairs("ranks", now, roster, [], 1)
        undecided = undecided_inside(ranks, roster.hosts_by_node[node], judgement.detail)
        now = _blame(now, judgement.findings or [undecided], stage, judgement.victims)
    return now


def _search(
    settings: WorkerSettings, heard: StepReports, now: StepConclusion, roster: RankRoster, detail: str
) -> StepConclusion:
    """The group failed, and the ranks' reports blame no rank."""
    if heard.step == "bandwidth" or len(roster.ranks_by_node) == 1:
        where = f"inside node {roster.ranks[0].host}" if len(roster.ranks_by_node) == 1 else "over all ranks"
        sentence = f"the process group {where} failed; the rank at fault is unknown: {detail}"
        next_ = "Run `gpuwatch check --nccl-debug` and read the log."
        stage, victims = stage_of(heard.step), sorted(heard.reports)
        return _blame(now, [failure(Code.GROUP_UNDECIDED, stage, "job", [], [], sentence, next_, victims=victims)])
    if settings.preflight == "quick":
        return replace(now, next="inside")
    return _try_pairs("pairs", now, roster, [], 1)


def _try_pairs(
    kind: str, now: StepConclusion, roster: RankRoster, tried: list[PairResult], number: int
) -> StepConclusion:
    """The next round of pairs of nodes (kind `pairs`) or of ranks (`ranks`); the verdict when none is left to try."""
    of_ranks, nodes, hosts = kind == "ranks", roster.ranks_by_node, roster.hosts_by_rank
    each, good_partners = (hosts, blaming.GOOD_PARTNERS) if of_ranks else (nodes, blaming.PARTNERS)
    pairs = blaming.next_pairs(tried, each, good_partners) if number <= blaming.ROUNDS else []
    if pairs:
        return replace(now, next=f"{kind} {number}", pairs=pairs, tried=tried)
    if of_ranks:
        return _blame(now, blaming.blame_ranks(tried, hosts, now.why))
    return _blame(now, blaming.blame(tried, nodes, roster.hosts_by_node))


def _of_pairs(heard: StepReports, before: StepConclusion, now: StepConclusion, roster: RankRoster) -> StepConclusion:
    tried, stage = list(before.tried), stage_of(heard.step)
    kind, _, number = heard.step.partition(" ")
    of_ranks = kind == "ranks"
    for a, b in before.pairs:
        ranks = [a, b] if of_ranks else roster.ranks_of(a, b)
        reports = {rank: heard.reports[rank] for rank in ranks}
        judgement = judge_group(stage, reports, roster.hosts_by_rank, one_node=of_ranks)
        tried.append(PairResult(a, b, not judgement.failed, judgement.detail))
        now = _blame(now, judgement.findings)
    if now.failed:
        return now
    return _try_pairs(kind, now, roster, tried, int(number) + 1)


# -- totals ---------------------------------------------------------------------------------------------------------


def _blame(
    now: StepConclusion,
    findings: Collection[PreflightFinding],
    stage: str = "",
    victims: Mapping[int, str] = MappingProxyType({}),
) -> StepConclusion:
    """`now` with these findings. A finding of grade fail makes its ranks failed.

    `victims`: ranks that failed in this stage only because of others, with their reports.
    """
    outcomes = {outcome.rank: outcome for outcome in now.outcomes}
    for finding in findings:
        if finding.grade != "fail":
            continue
        for rank in finding.victims:
            outcomes.setdefault(rank, RankOutcome(rank, "victim", finding.stage, finding.sentence))
        if finding.subject in ("rank", "gpu", "node"):
            for rank in finding.ranks:
                if rank not in outcomes or outcomes[rank].outcome == "victim":
                    outcomes[rank] = RankOutcome(rank, "failed", finding.stage, finding.sentence)
    for rank, detail in victims.items():
        if rank not in outcomes or outcomes[rank].outcome == "victim":
            outcomes[rank] = RankOutcome(rank, "victim", stage, detail)
    return replace(now, findings=[*now.findings, *findings], outcomes=[outcomes[rank] for rank in sorted(outcomes)])
