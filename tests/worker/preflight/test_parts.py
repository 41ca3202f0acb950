"""One rank's tests, and how many processes they need."""

from __future__ import annotations

import os
import signal

import pytest
from gpuwatch.core.identity import RankIdentity
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker.preflight.device_tests import AllocationResult
from gpuwatch.worker.preflight.inventory import HealthResult
from gpuwatch.worker.preflight.parts import RankTests
from gpuwatch.worker.preflight.probe_child import RankChild
from gpuwatch.worker.preflight.steps import StageDeadlines
from msgspec.structs import replace

ONE = RankIdentity(0, 0, 1, 1, "localhost", 1, True)
GPU = "GPU-1"


def parts_of(perform=None, timeout_s=60.0):
    parts = RankTests(ONE, WorkerSettings("", alloc="1MiB"), StageDeadlines(timeout_s), "gpuwatch/0", "")
    if perform is not None:
        parts.child = RankChild(lambda test, say: perform(test, os.getpid()))
    parts.facts = replace(parts.facts, device="cuda:0", uuid=GPU, host="n0")
    return parts


@pytest.mark.slow
def test_the_quick_stages_share_one_process(run_ranks):
    """Each process that uses CUDA makes a context of its own."""
    outcomes = run_ranks("quick", [0, 1])

    for outcome in outcomes.values():
        assert outcome["value"]["kinds"] == ["ok", "ok", "ok"]
        assert outcome["value"]["forks"] == 1
        assert outcome["value"]["left"] == 0


@pytest.mark.slow
def test_who_waits_for_a_rank_that_has_failed_stops(run_ranks):
    outcomes = run_ranks("one fails", [0, 1, 2], group=[0, 1, 2], timeout_s=20.0)

    for rank in (0, 1):  # at the deadline they would accuse it: it did not reach the group
        report = outcomes[rank]["value"]
        assert (report["kind"], report["own"], report["said"]) == ("raised", False, "init")
        assert report["detail"] == "it stopped, as rank 2 had failed"
        assert "peers" not in report


@pytest.mark.slow
def test_a_rank_of_another_group_that_has_failed_stops_nobody(run_ranks):
    outcomes = run_ranks("one fails", [0, 1, 2], group=[0, 1], timeout_s=2.0)

    for rank in (0, 1):
        assert outcomes[rank]["value"]["detail"].startswith("all_reduce did not end within 1 s")


@pytest.mark.slow
def test_a_stage_that_hangs_ends_the_process_and_is_told():
    pids = []

    def perform(test, pid):
        if test.func.__name__ == "allocate":
            signal.pause()
        return HealthResult([], str(pid))

    parts = parts_of(perform, timeout_s=1.0)
    try:
        pids.append(parts.health().detail)
        report = parts.allocation([GPU])
        pids.append(parts.health().detail)
    finally:
        parts.child.close()
    assert (report.kind, report.detail, report.own) == ("hung", "hung for 1 s", True)
    assert pids[0] != pids[1]


@pytest.mark.parametrize(("hangs", "children"), [(False, 1), (True, 2)])
def test_a_load_that_hangs_is_left_to_its_own_process(hangs, children):
    parts = parts_of(lambda test, pid: HealthResult([], str(pid), hangs))
    try:
        pids = {parts.health().detail for _ in range(2)}
    finally:
        parts.child.close()
    assert len(pids) == children


@pytest.mark.parametrize(
    ("gpus", "sharers"), [([GPU], 1), ([GPU, "GPU-2"], 1), ([GPU, GPU, "GPU-2", GPU], 3), (["", ""], 1)]
)
def test_who_shares_a_gpu_is_known_by_its_uuid(gpus, sharers):
    parts = parts_of(lambda test, pid: AllocationResult(f"{test.keywords['sharers']} sharers"))
    try:
        assert parts.allocation(gpus).detail == f"{sharers} sharers"
    finally:
        parts.child.close()


def test_little_free_memory_is_a_warning():
    parts = parts_of(lambda test, pid: AllocationResult("done", "only 1 MiB of 80.0 GiB free on cuda:0", "Look."))
    try:
        report = parts.allocation([GPU])
    finally:
        parts.child.close()
    (finding,) = report.findings
    assert (report.kind, finding.grade, finding.subject, finding.device) == ("ok", "warn", "gpu", GPU)
    assert finding.sentence == "rank 0 (n0) finds only 1 MiB of 80.0 GiB free on cuda:0"
