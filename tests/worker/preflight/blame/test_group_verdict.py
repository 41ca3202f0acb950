"""Who is to blame for a group that failed."""

from __future__ import annotations

import pytest
from gpuwatch.worker.preflight.blame.group_blame import judge_group
from gpuwatch.worker.preflight.steps import RankStepReport

OK = RankStepReport()
TIMED_OUT = RankStepReport("raised", "timed out", own=False, said="all_gather")
DIED = RankStepReport("died", "killed by SIGKILL", said="all_gather")
HUNG = RankStepReport("hung", "hung at all_gather for 60 s", said="all_gather")
HUNG_EARLY = RankStepReport("hung", "hung at init for 60 s", said="init")
WRONG = RankStepReport("raised", "it adds wrong", own=True)
GONE = RankStepReport("died", "killed by SIGABRT: Watchdog caught collective operation timeout", own=False)


def accuses(*ranks: int) -> RankStepReport:
    return RankStepReport("raised", "wrong values", own=False, peers=list(ranks))


@pytest.mark.parametrize(
    ("members", "guilty", "guilty_across_nodes"),
    [
        ([TIMED_OUT, DIED, HUNG, OK], [1], [1]),
        ([TIMED_OUT, WRONG, TIMED_OUT], [1], [1]),
        ([WRONG, DIED], [0, 1], [0, 1]),
        ([accuses(1), OK, accuses(1)], [1], [1]),
        ([accuses(1), accuses(0), accuses(1)], [1], [1]),
        ([accuses(1), accuses(0)], [], []),
        ([accuses(0), OK], [], []),
        ([GONE, GONE, TIMED_OUT], [], []),
        ([TIMED_OUT, HUNG, TIMED_OUT], [1], []),
        ([HUNG, HUNG_EARLY, HUNG], [1], []),
        ([HUNG, HUNG_EARLY], [], []),
        ([HUNG, HUNG, HUNG], [], []),
        ([TIMED_OUT, TIMED_OUT], [], []),
    ],
)
def test_who_is_named(members, guilty, guilty_across_nodes):
    reports = dict(enumerate(members))
    for one_node, expected in ((True, guilty), (False, guilty_across_nodes)):
        judgement = judge_group("node group", reports, {1: "gpu-001"}, one_node=one_node)
        assert judgement.failed
        assert [finding.ranks for finding in judgement.findings] == [[rank] for rank in expected]
        bad = {rank for rank, report in reports.items() if report.kind != "ok"}
        assert set(judgement.victims) == bad - set(expected)


def test_a_good_group_and_one_without_this_rank_are_no_failure():
    assert not judge_group("node group", {0: OK, 1: OK, 2: RankStepReport("idle")}, {}).failed


def test_the_sentence_says_rank_host_step_and_what_happened():
    (finding,) = judge_group("node group", {0: TIMED_OUT, 1: DIED}, {1: "gpu-001"}).findings
    assert finding.sentence == "rank 1 (gpu-001) died at all_gather: killed by SIGKILL"
    assert (finding.grade, finding.subject, finding.hosts, finding.victims) == ("fail", "rank", ["gpu-001"], [0])
