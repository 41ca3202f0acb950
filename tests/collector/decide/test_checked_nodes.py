"""A check that passed says what was good on each node, as `torch-distributed-gpu-test.py` does of each rank."""

from __future__ import annotations

from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.events.preflight_events import RankInventoryEvent
from gpuwatch.core.preflight import InventoryFacts
from gpuwatch.core.wire.messages import EventMessage

VERSIONS = {"python": "3.12.3", "nccl": "2.29.7", "cuda": "13.0", "torch": "2.14.1", "gpuwatch": "0.1"}
H100 = "NVIDIA H100 80GB HBM3"
OF_H100 = f"{H100}, torch 2.14.1, CUDA 13.0, NCCL 2.29.7, driver 580.95"


def said(make, nodes, findings=(), without=None):
    """The evidence of a check of `nodes`, each a dict of what differs there, with two ranks each."""
    heard = []
    for node, given in enumerate(nodes):
        agent, host = f"a{node}", f"n{node}"
        bodies = [make.hello(agent, host=host, nodes=len(nodes), check_only=True)]
        for local in range(2):
            rank = 2 * node + local
            place = make.where(rank)
            has = {"device": f"cuda:{local}", "device_name": H100, "driver": "580.95", "versions": VERSIONS, **given}
            if rank != without:
                facts = InventoryFacts(host=host, **has)
                bodies.append(EventMessage(RankInventoryEvent(place, facts.device, facts.versions, facts)))
            bodies.append(make.concluded(rank, findings, stops=False))
        bodies.append(make.NodeBye("ok"))
        heard += [(agent, number, body) for number, body in enumerate(bodies, 1)]
    verdict = decide(fold(heard, ()))
    assert (verdict.kind, verdict.certainty) == ("clean", "established")
    return verdict.evidence


def test_a_node_is_one_line_with_what_it_runs_on(make):
    assert said(make, [{}]) == [f"n0: 2 of 2 GPUs OK, {OF_H100}"]


def test_nodes_that_are_alike_share_a_line(make):
    assert said(make, [{}] * 2) == [f"n0 and n1, each: 2 of 2 GPUs OK, {OF_H100}"]
    assert said(make, [{}] * 64) == [f"n0, n1, n2, n3 and 60 more, each: 2 of 2 GPUs OK, {OF_H100}"]


def test_one_that_differs_has_its_own(make):
    assert said(make, [{}, {"driver": "570.1"}]) == [
        f"n0: 2 of 2 GPUs OK, {OF_H100}",
        f"n1: 2 of 2 GPUs OK, {OF_H100.replace('580.95', '570.1')}",
    ]


def test_without_a_gpu_it_is_the_cpu_and_no_driver(make):
    on_cpu = {"device": "cpu", "device_name": "", "versions": {"torch": "2.13.0+cpu", "python": "3.11.7"}}
    assert said(make, [on_cpu]) == ["n0: 2 of 2 ranks OK on the CPU, torch 2.13.0+cpu"]


def test_a_gpu_with_a_warning_is_named_and_no_number_reads_as_a_failure(make):
    warning = make.found("health", "warn", "gpu", [1], ["n0"], "4 ECC errors")
    of_the_job = make.found("consistency", "warn", "job", [0, 1], ["n0"], "no common network")
    assert said(make, [{}], [warning, of_the_job]) == [
        f"n0: 2 of 2 GPUs OK (rank 1 with a warning), {OF_H100}",
        "consistency, warn: no common network",
        "health, warn: 4 ECC errors",
    ]


def test_two_ranks_of_which_other_load_has_made_one_slow_are_both_ok(make):
    on_cpu = {"device": "cpu", "device_name": "", "versions": {"torch": "2.13.0+cpu"}}
    slow = make.found("compute", "warn", "rank", [1], ["n0"], "rank 1 took 9.8 ms for a matmul, 1.9 times the median")
    assert said(make, [on_cpu], [slow])[0] == "n0: 2 of 2 ranks OK on the CPU (rank 1 with a warning), torch 2.13.0+cpu"


def test_a_gpu_that_failed_is_not_ok_and_one_that_was_not_tested_is_said_to_be_so(make):
    """A failure that stops nothing."""
    failed = make.found("health", "fail", "gpu", [0], ["n0"], "4 uncorrectable ECC errors")
    unknown = make.found("health", "unknown", "gpu", [1], ["n0"], "no NVML")
    assert (
        said(make, [{}], [failed, unknown])[0]
        == f"n0: 1 of 2 GPUs OK (rank 0 not, rank 1 not tested in full), {OF_H100}"
    )


def test_of_a_rank_without_an_inventory_its_node_says_nothing(make):
    assert said(make, [{}, {}], without=3) == [f"n0: 2 of 2 GPUs OK, {OF_H100}"]
