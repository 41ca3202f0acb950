"""What follows from a step: the whole course of a preflight, replayed without processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gpuwatch.core.preflight import InventoryFacts, PreflightFinding
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.preflight.blame import conclude as concluding
from gpuwatch.worker.preflight.blame.conclude import StepReports, conclude, conclude_softly
from gpuwatch.worker.preflight.steps import (
    ComputeResult,
    RankAttendance,
    RankStepReport,
    StepConclusion,
    stage_of,
    steps_of,
)

OK = RankStepReport()
TIMED_OUT = RankStepReport("raised", "timed out", own=False, said="all_reduce")
Fault = Callable[[str, int, StepConclusion], RankStepReport | None]


def settings(mode: str = "quick") -> WorkerSettings:
    return WorkerSettings("", preflight=mode, preflight_timeout_s=60.0)


class Job:
    """A job of `nodes` nodes with `size` ranks each, in which `fault` says what a rank reports that is not well."""

    def __init__(
        self, nodes: int, mode: str = "quick", fault: Fault = lambda step, rank, before: None, size: int = 2
    ) -> None:
        self.world, self.size = size * nodes, size
        self.terms = settings(mode)
        self.fault = fault
        self.steps: list[str] = []
        self.end = self.run()

    def good(self, step: str, rank: int) -> RankStepReport:
        if step == "arrive":
            node, local_rank = divmod(rank, self.size)
            return RankStepReport(attendance=RankAttendance(f"node-{node}", node, local_rank, self.size, "cpu"))
        if step == "consistency":
            return RankStepReport(facts=InventoryFacts(host=f"node-{rank // self.size}", node=rank // self.size))
        if step == "compute":
            return RankStepReport(computed=ComputeResult("abc", 1.0, "cpu"))
        return OK

    def run(self) -> StepConclusion:
        now, roster = StepConclusion(next="arrive"), None
        while now.next:
            step = now.next
            self.steps.append(step)
            reports = {rank: self.fault(step, rank, now) or self.good(step, rank) for rank in range(self.world)}
            silent = [rank for rank, report in reports.items() if report.detail == "silent"]
            heard = StepReports(step, {rank: one for rank, one in reports.items() if rank not in silent}, silent)
            now = conclude(self.terms, heard, now, roster)
            roster = now.roster or roster
        return now

    @property
    def failures(self) -> list[PreflightFinding]:
        return [finding for finding in self.end.findings if finding.grade == "fail"]

    @property
    def standings(self) -> dict[int, str]:
        return {outcome.rank: outcome.outcome for outcome in self.end.outcomes}


@pytest.mark.parametrize("mode", ["quick", "full"])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_good_job_goes_through_all_stages_and_nothing_is_found(mode, nodes):
    job = Job(nodes, mode)
    assert job.steps == steps_of("full" if mode == "full" else "quick", nodes)
    assert (job.failures, job.end.outcomes) == ([], [])


def test_stages_are_those_that_the_user_knows():
    assert [stage_of(step) for step in ("heads", "inside", "pairs 3")] == ["cross group", "node group", "cross group"]


@pytest.mark.parametrize("step", ["allocation", "health"])
def test_what_one_rank_finds_keeps_no_other_from_its_own_tests_but_all_from_a_group(step):
    report = RankStepReport("raised", "no room", own=True) if step == "allocation" else None
    finding = PreflightFinding(step, "fail", "gpu", [3], ["node-1"], "the GPU of rank 3 (node-1) needs a reset")
    bad = report or RankStepReport(findings=[finding])
    job = Job(2, "full", lambda at, rank, before: bad if (at, rank) == (step, 3) else None)
    assert job.steps == ["arrive", "consistency", "health", "allocation", "compute"]
    assert job.standings == {3: "failed"}


@pytest.mark.parametrize("step", ["consistency", "allocation", "cross group"])
def test_a_rank_that_goes_silent_ends_it_at_once(step):
    job = Job(2, fault=lambda at, rank, before: RankStepReport(detail="silent") if (at, rank) == (step, 2) else None)
    assert job.steps[-1] == step
    (found,) = job.failures
    assert (found.ranks, found.sentence) == ([2], f"rank 2 (node-1) stopped reporting in stage {step}")
    assert job.standings == {0: "victim", 1: "victim", 2: "failed", 3: "victim"}


def test_a_node_that_goes_silent_is_one_finding():
    silent = RankStepReport(detail="silent")
    job = Job(3, fault=lambda at, rank, before: silent if at == "allocation" and rank in (2, 3, 5) else None)
    assert [(found.subject, found.ranks) for found in job.failures] == [("node", [2, 3]), ("rank", [5])]


def test_a_coordinator_that_fell_is_told_in_its_own_words():
    fallen = RankStepReport("fallen", "died in stage compute: killed by SIGKILL", said="compute")
    job = Job(2, "full", lambda at, rank, before: fallen if (at, rank) == ("compute", 1) else None)
    (found,) = job.failures
    assert (found.stage, found.sentence) == ("compute", "rank 1 (node-0) died in stage compute: killed by SIGKILL")
    assert job.steps[-1] == "compute"


def test_an_error_of_the_test_fails_nobody():
    fault = RankStepReport("fault", "TypeError: oops")
    job = Job(2, fault=lambda at, rank, before: fault if (at, rank) == ("cross group", 1) else None)
    assert job.failures == []
    assert job.end.findings[-1].grade == "unknown"


def test_an_error_in_the_conclusion_fails_nobody(monkeypatch):
    def broken(*_):
        raise TypeError("oops")

    monkeypatch.setattr(concluding, "missing_findings", broken)
    now = conclude_softly(settings(), StepReports("arrive", {0: OK}, [1]), StepConclusion(next="arrive"), None)
    assert (now.next, now.failed, now.arrived) == ("", False, 1)
    assert "TypeError: oops" in now.findings[0].sentence


def test_a_leader_that_draws_no_conclusion_is_named_only_if_it_waits_for_nobody():
    reports = {rank: Job(1).good("arrive", rank) for rank in range(2)}
    all_there = conclude(
        settings(),
        StepReports("arrive", reports, [], leader_failed=True),
        StepConclusion(next="arrive"),
        None,
    )
    assert all_there.next == ""
    assert all_there.findings[0].sentence == "rank 0 (node-0) sent no conclusion in stage arrive"
    waits = conclude(
        settings(),
        StepReports("arrive", reports, [2], leader_failed=True),
        StepConclusion(next="arrive"),
        None,
    )
    assert [finding.ranks for finding in waits.findings] == [[2]]


# -- a group over several nodes that fails ----------------------------------------------------------------------------


def bad_between(*links: tuple[int, int]) -> Fault:
    """Groups that hold two nodes whose link is bad time out; alone, each node is fine."""

    def fault(step: str, rank: int, before: StepConclusion) -> RankStepReport | None:
        if step in ("cross group", "heads"):
            return TIMED_OUT
        if step.startswith("pairs "):
            pair = next((pair for pair in before.pairs if rank // 2 in pair), None)
            return TIMED_OUT if pair in links else None
        return None

    return fault


def test_quick_goes_on_as_full_does_when_the_group_fails():
    job = Job(4, "quick", bad_between((0, 2)))
    assert job.steps[4:7] == ["cross group", "inside", "pairs 1"]
    (found,) = job.failures
    assert (found.subject, sorted(found.hosts)) == ("link", ["node-0", "node-2"])
    assert "failed" not in job.standings.values()


def test_full_has_seen_the_nodes_inside_and_goes_to_the_pairs():
    job = Job(4, "full", bad_between((1, 3)))
    assert job.steps[5:8] == ["node group", "heads", "pairs 1"]
    assert [found.subject for found in job.failures] == ["link"]


def test_a_node_that_works_with_nobody_is_bad():
    job = Job(4, "quick", bad_between((0, 2), (1, 2), (2, 3)))
    (found,) = job.failures
    assert (found.subject, found.hosts) == ("node", ["node-2"])
    assert {rank for rank, standing in job.standings.items() if standing == "failed"} == {4, 5}


def test_of_two_nodes_nobody_knows():
    job = Job(2, "quick", bad_between((0, 1)))
    (found,) = job.failures
    assert found.subject == "link"
    assert "node undetermined" in found.sentence
    assert set(job.standings.values()) == {"victim"}


def test_a_node_that_fails_inside_explains_it_and_no_pairs_are_tried():
    def fault(step: str, rank: int, before: StepConclusion) -> RankStepReport | None:
        return TIMED_OUT if step == "cross group" or (step == "inside" and rank in (2, 3)) else None

    job = Job(3, "quick", fault)
    assert job.steps[-1] == "inside"
    (found,) = job.failures
    assert (found.subject, found.hosts) == ("node", ["node-1"])


def test_a_rank_that_died_is_named_without_more_tests():
    died = RankStepReport("died", "killed by SIGKILL", said="all_reduce")
    job = Job(3, "quick", lambda at, rank, before: (died if rank == 4 else TIMED_OUT) if at == "cross group" else None)
    assert job.steps[-1] == "cross group"
    assert [found.ranks for found in job.failures] == [[4]]
    assert job.standings == {**dict.fromkeys(range(6), "victim"), 4: "failed"}


@pytest.mark.parametrize("mode", ["quick", "full"])
@pytest.mark.parametrize(("size", "named"), [(2, []), (3, [1]), (8, [1])])
def test_pairs_of_ranks_are_tried_if_the_only_node_fails_inside(mode, size, named):
    """Rank 1 never connects, and no rank can tell which one it waits for."""

    def fault(step: str, rank: int, before: StepConclusion) -> RankStepReport | None:
        pair = next((pair for pair in before.pairs if rank in pair), (rank,))
        return TIMED_OUT if step == "node group" or (step.startswith("ranks ") and 1 in pair) else None

    job = Job(1, mode, fault, size)
    rounds = [step for step in job.steps if step.startswith("ranks ")]
    assert rounds == [f"ranks {number + 1}" for number in range(len(rounds))]
    assert (1 <= len(rounds) <= 3) == bool(named)
    (found,) = job.failures
    assert (found.stage, found.ranks) == ("node group", named)
    assert job.standings == {rank: "failed" if rank in named else "victim" for rank in range(size)}
    assert "timed out" in found.sentence


def test_a_rank_that_dies_beside_its_partner_is_named_without_more_pairs():
    died = RankStepReport("died", "killed by SIGKILL", said="all_reduce")

    def fault(step: str, rank: int, before: StepConclusion) -> RankStepReport | None:
        return TIMED_OUT if step == "node group" else died if step.startswith("ranks ") and rank == 2 else None

    job = Job(1, fault=fault, size=4)
    assert job.steps[-1] == "ranks 1"
    assert [found.ranks for found in job.failures] == [[2]]
