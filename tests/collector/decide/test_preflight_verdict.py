"""Who is to blame: a pure function over what the preflight found."""

from __future__ import annotations

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.collector.run_files import exit_code
from gpuwatch.core.events.node_events import GpuCounters, GpuHealth, GpuXid, NodeSignal
from gpuwatch.core.events.preflight_events import RankInventoryEvent
from gpuwatch.core.preflight import InventoryFacts
from gpuwatch.core.wire.messages import EventMessage


def facts_of(*bodies, lost=()):
    return fold([("a0", number, body) for number, body in enumerate(bodies, 1)], lost)


def judge(*bodies) -> Verdict:
    return decide(facts_of(*bodies))


def stopped(make, findings, outcomes=None, nproc=4) -> Verdict:
    """The verdict over ranks that all heard the same findings."""
    results = []
    for rank in range(nproc):
        outcome, stage, detail = (outcomes or {}).get(rank, ("ok", "", ""))
        results += [make.concluded(rank, findings, outcome, stage, detail), make.ended(rank, 3)]
    return judge(make.hello(host="alpha", nproc=nproc), *results, make.NodeBye("failed"))


def test_a_bad_gpu_is_named_with_its_rank_host_and_device(make):
    finding = make.found(
        "compute",
        "fail",
        "gpu",
        [2],
        ["alpha"],
        "rank 2 gets a different matmul result",
        next="Leave it out.",
        device="GPU-7",
    )
    verdict = stopped(make, [finding])

    assert (verdict.kind, verdict.certainty, verdict.stage) == ("preflight", "established", "compute")
    assert (verdict.rank, verdict.host, verdict.device) == (2, "alpha", "GPU-7")
    assert verdict.statement == "Preflight, stage compute: rank 2 gets a different matmul result."
    assert verdict.next == ["Leave it out."]


def test_a_bad_node_is_named_and_no_rank_of_it(make):
    verdict = stopped(make, [make.found("cross group", "fail", "node", [2, 3], ["beta"], "node beta is cut off")])
    assert (verdict.rank, verdict.host, verdict.certainty) == (None, "beta", "established")


def test_between_two_nodes_it_is_the_link_and_neither_node(make):
    finding = make.found(
        "cross group", "fail", "link", [0, 1, 2, 3], ["alpha", "beta"], "the link failed; node undetermined"
    )
    verdict = stopped(make, [finding])
    assert (verdict.rank, verdict.host, verdict.device, verdict.certainty) == (None, None, None, "supported")
    assert "node undetermined" in verdict.statement


def test_where_nobody_can_be_blamed_nobody_is(make):
    verdict = stopped(make, [make.found("compute", "fail", "job", [0, 1], ["alpha"], "two results, undetermined")])
    assert (verdict.rank, verdict.host, verdict.certainty) == (None, None, "unknown")


def test_victims_are_called_victims(make):
    finding = make.found("node group", "fail", "rank", [1], ["alpha"], "rank 1 died", victims=[0])
    outcomes = {1: ("failed", "node group", "died"), 2: ("victim", "node group", "rank 1 went away")}
    verdict = stopped(make, [finding], outcomes)

    assert verdict.rank == 1
    assert [(entry.rank, entry.how) for entry in verdict.cascade] == [
        (0, "is a victim of what failed in stage node group"),
        (2, "is a victim: rank 1 went away"),
    ]
    assert "rank 1 on alpha: failed in stage node group: died" not in verdict.evidence, "it is in the statement"


def test_the_first_stage_comes_first_whoever_told_it(make):
    early = make.found("arrive", "fail", "rank", [3], ["beta"], "rank 3 did not arrive", next="Look at beta.")
    late = make.found("compute", "fail", "gpu", [0], ["alpha"], "rank 0 computes wrong", next="Look at alpha.")
    warning = make.found("inventory", "warn", "node", [0], ["alpha"], "little memory")
    verdict = stopped(make, [late, warning, early])

    assert (verdict.stage, verdict.rank) == ("arrive", 3)
    assert "later, in stage compute: rank 0 computes wrong" in verdict.evidence
    assert verdict.next == ["Look at beta.", "Look at alpha."]
    assert not any("little memory" in line for line in verdict.evidence), "a warning stops nothing"


def test_several_in_one_stage_are_all_told(make):
    both = [make.found("health", "fail", "gpu", [rank], ["alpha"], f"GPU of rank {rank} is bad") for rank in (0, 3)]
    verdict = stopped(make, both)
    assert verdict.statement.endswith("And 1 other finding in the same stage.")
    assert "health, fail: GPU of rank 3 is bad" in verdict.evidence


def test_who_came_through_and_who_is_stuck_is_evidence(make):
    finding = make.found("compute", "fail", "rank", [1], ["alpha"], "rank 1 hangs")
    bodies = [make.hello(host="alpha", nproc=4), make.began(1, "compute")]
    bodies += [make.stage(rank, "compute") for rank in (0, 2, 3)]
    verdict = judge(*bodies, *(make.concluded(rank, [finding]) for rank in range(4)), make.NodeBye("failed"))
    assert verdict.evidence == ["ranks 0, 2, 3 passed stage compute", "rank 1 did not finish it"]


def test_findings_that_did_not_stop_the_job_are_no_verdict(make):
    finding = make.found("compute", "fail", "rank", [1], ["alpha"], "rank 1 computes wrong")
    results = [make.concluded(rank, [finding], stops=False) for rank in (0, 1)]
    ended = [event for rank in (0, 1) for event in make.finished(rank)]
    assert judge(make.hello(), *results, *ended, make.NodeBye("ok")).kind == "clean"


def test_without_any_conclusion_the_ranks_own_words_decide(make):
    verdict = judge(
        make.hello(host="alpha"),
        make.preflight(0, "victim", "compute", "rank 0 sent no conclusion"),
        make.preflight(1, "failed", "allocation", "no memory"),
        make.NodeBye("failed"),
    )
    assert (verdict.rank, verdict.stage, verdict.certainty) == (1, "allocation", "established")


# -- check --------------------------------------------------------------------------------------------------------


def checked(make, *bodies, nproc=2, nodes=1, outcome="ok", host="alpha"):
    facts = facts_of(make.hello(host=host, nproc=nproc, nodes=nodes, check_only=True), *bodies, make.NodeBye(outcome))
    report = build_report(facts, run_id="r", started=None, ended=None)
    return report.verdict, exit_code(report)


def test_a_check_without_trouble_passed(make):
    bodies = [event for rank in (0, 1) for event in (make.stage(rank, "compute", 1.5), make.concluded(rank))]
    verdict, code = checked(make, *bodies)
    assert (verdict.kind, verdict.certainty, code) == ("clean", "established", 0)
    assert verdict.statement == "Preflight passed: 2 ranks on 1 node in 1.5 s."


def test_a_check_with_warnings_passed_and_tells_them(make):
    warning = make.found("health", "warn", "gpu", [0], ["alpha"], "4 ECC errors", next="Watch it.")
    unknown = make.found("health", "unknown", "node", [0, 1], ["alpha"], "NVML is not there")
    verdict, code = checked(make, *(make.concluded(rank, [unknown, warning]) for rank in (0, 1)))
    assert code == 0
    assert verdict.statement.endswith(", with 1 warning and 1 unknown.")
    assert verdict.evidence == ["health, warn: 4 ECC errors", "health, unknown: NVML is not there"]
    assert verdict.next == ["Watch it."]


def test_a_failed_check_exits_with_3(make):
    finding = make.found("compute", "fail", "rank", [1], ["alpha"], "rank 1 computes wrong")
    bodies = [event for rank in (0, 1) for event in (make.concluded(rank, [finding]), make.ended(rank, 3))]
    verdict, code = checked(make, *bodies, outcome="failed")
    assert (verdict.kind, verdict.rank, code) == ("preflight", 1, 3)


def test_a_node_that_was_never_heard_fails_a_check(make):
    verdict, code = checked(make, nproc=8, nodes=4, outcome="failed")
    assert (verdict.kind, verdict.stage, code) == ("preflight", "arrive", 3)
    assert "3 of 4 nodes did not arrive" in verdict.statement
    assert verdict.evidence == ["heard from: alpha"]


@pytest.mark.parametrize("outcome", ["ok", "failed"])
@pytest.mark.parametrize("stops", [False, True])
def test_a_rank_without_a_result_fails_a_check(make, outcome, stops):
    skipped = make.concluded(1, [], "skipped", detail="no store", stops=stops)
    verdict, code = checked(make, make.concluded(0), skipped, outcome=outcome)
    assert (verdict.kind, verdict.certainty, code) == ("preflight", "unknown", 3)
    assert "rank 1 gave no result (no store)" in verdict.statement


def test_a_rank_that_never_started_fails_a_check(make):
    verdict, code = checked(make, make.concluded(0))
    assert ("1 rank of 2 never started" in verdict.statement, code) == (True, 3)


def test_a_worker_that_is_killed_fails_a_check(make):
    killed = make.ended(1, -9, phase="preflight")
    verdict, code = checked(make, make.concluded(0), make.began(1, "compute"), killed, outcome="failed")
    assert (verdict.kind, verdict.rank, code) == ("lost", 1, 3)


def test_a_check_that_the_user_ends_says_where_it_was(make):
    ended = make.ended(1, -2, "torchrun", phase="preflight")
    verdict, code = checked(
        make, make.began(1, "cross group"), EventMessage(NodeSignal(2, 1)), ended, outcome="signal", nproc=1
    )
    assert (verdict.kind, code) == ("interrupted", 130)
    assert verdict.statement == "The check was ended from outside by SIGINT."
    assert "rank 1: in the preflight, stage cross group" in verdict.evidence


# -- the GPU that is named ----------------------------------------------------------------------------------------


def overflowed(make, *gpu_events) -> Verdict:
    batch = make.Batch(1, batch=3)
    x = batch.tensor()
    batch.call("fc", "Linear", given=[x], returned=[batch.tensor(make.INF)])
    facts = InventoryFacts(host="alpha", uuid="GPU-1")
    inventory = EventMessage(RankInventoryEvent(make.where(1), "cuda:1", {}, facts))
    events = [EventMessage(event) for event in gpu_events]
    return judge(make.hello(host="alpha"), inventory, *batch.messages(), *events, make.NodeBye("failed"))


def counters(moment, corrected, time_ns, device="GPU-1"):
    return GpuCounters(device, moment, {"ecc_uncorrected_volatile": corrected}, time_ns=time_ns)


def test_counters_that_grew_since_the_preflight_are_evidence(make):
    others = counters("anomaly", 9, 3_000_000_000, "GPU-2")
    verdict = overflowed(make, counters("before", 1, 1), counters("anomaly", 3, 2_000_000_000), others)
    assert (verdict.kind, verdict.rank) == ("overflow", 1)
    assert any("uncorrectable ECC errors: 1 -> 3" in line for line in verdict.evidence)
    assert not any("GPU-2" in line for line in verdict.evidence)


def test_an_xid_is_evidence_and_says_what_to_do_first(make):
    xid = GpuXid("GPU-1", 48, 5, "double-bit ECC error", "Reset the GPU.", "fail")
    verdict = overflowed(make, xid)
    assert "the driver reported XID 48 (double-bit ECC error) for its GPU GPU-1" in verdict.evidence
    assert verdict.next[0] == "Reset the GPU."


def test_a_gpu_of_which_nothing_is_known_is_unknown_and_not_well(make):
    verdict = overflowed(make, GpuHealth("unknown", "NVML is not there"))
    assert "its GPU GPU-1 since the preflight: unknown, NVML is not there" in verdict.evidence


def test_a_gpu_whose_counters_stood_still_is_said_to_be(make):
    verdict = overflowed(make, counters("before", 1, 1), counters("end", 1, 2_000_000_000))
    assert any("no error counter has grown since the preflight" in line for line in verdict.evidence)
