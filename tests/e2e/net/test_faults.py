"""Faults of the network, for real: packets that are lost, nodes that are cut off, links that are slow."""

import pytest
from network import can_delay

pytestmark = [pytest.mark.slow, pytest.mark.sample(2, of="a bad network")]  # of those without a mark of their own
sample = pytest.mark.sample

STOPPED = 3
PREFLIGHT = 3
WITHIN_S = 600
"""Well beyond the sum of the deadlines of all stages that such a run can reach, with this timeout."""
TIMEOUT = ("--preflight-timeout", "15")
ONLY_RENDEZVOUS = "29400-29401"


def failures(run):
    return [finding for finding in run.report["preflight"]["findings"] if finding["grade"] == "fail"]


def slow_links(run):
    """Hosts of what is slow. There may be more than one put in, on a machine that is busy, but never a node."""
    findings = [one for one in run.report["preflight"]["findings"] if one["stage"] == "bandwidth"]
    slow = [finding for finding in findings if finding["grade"] == "warn"]
    assert {finding["subject"] for finding in slow} == {"link"}
    return [finding["hosts"] for finding in slow]


def hosts(*nodes):
    return [node.host for node in nodes]


def test_sound_nodes_pass(job):
    job = job(3)
    job.start_all("check", *TIMEOUT)
    runs = job.finish(WITHIN_S)

    assert [run.code for run in runs] == [0, 0, 0]
    preflight = runs[0].report["preflight"]
    assert [row["host"] for row in preflight["nodes"]] == hosts(*job.network.nodes)
    assert {"cross group", "bandwidth"} <= {column["stage"] for column in preflight["stages"]}
    assert failures(runs[0]) == []


@sample(1, of="a bad link")
@pytest.mark.parametrize(
    ("count", "a", "b", "command"),
    [(3, 1, 2, "launch"), (4, 1, 3, "check")],
)
def test_lost_packets_between_two_nodes_are_blamed_on_their_link(job, count, a, b, command):
    job = job(count)
    nodes = job.network.nodes
    job.network.drop(nodes[a], nodes[b])
    job.start_all(command, *TIMEOUT, **({"script": "clean.py"} if command == "launch" else {}))
    runs = job.finish(WITHIN_S)

    assert [run.code for run in runs] == [STOPPED] * count
    (found,) = failures(runs[0])
    assert (found["subject"], found["hosts"]) == ("link", hosts(nodes[a], nodes[b]))
    assert (found["ranks"], found["stage"]) == ([a, b], "cross group")
    verdict = runs[0].verdict
    assert verdict["kind"] == "preflight"
    assert f"the link between {nodes[a].host} and {nodes[b].host}" in verdict["statement"]
    assert (verdict["rank"], verdict["host"]) == (None, None)
    assert {victim["rank"] for victim in verdict["cascade"]} == set(range(count)) - {a, b}
    assert "rank 0 step" not in runs[0].stdout


@sample(1, of="a bad link")
@pytest.mark.parametrize("count", [2, 3])
def test_a_firewall_that_lets_only_the_rendezvous_through_is_the_link(job, count):
    job = job(count, static=True)
    a, b = job.network.nodes[:2]
    job.network.drop(a, b, but=ONLY_RENDEZVOUS)
    job.start_all("launch", *TIMEOUT, script="clean.py")
    runs = job.finish(WITHIN_S)

    assert [run.code for run in runs] == [STOPPED] * count
    (found,) = failures(runs[0])
    assert (found["subject"], found["hosts"]) == ("link", hosts(a, b))
    assert ("node undetermined" in found["sentence"]) == (count == 2)


def test_a_node_that_only_its_rendezvous_reaches_is_named(job):
    job = job(4, static=True)
    bad = job.network.nodes[2]
    for node in job.network.nodes:
        if node is not bad:
            job.network.drop(bad, node, but=ONLY_RENDEZVOUS)
    job.start_all("launch", *TIMEOUT, script="clean.py")
    runs = job.finish(WITHIN_S)

    assert [run.code for run in runs] == [STOPPED] * 4
    (found,) = failures(runs[0])
    assert (found["subject"], found["hosts"], found["ranks"]) == ("node", [bad.host], [2])
    assert found["victims"] == [0, 1, 3]
    assert runs[0].verdict["host"] == bad.host


@sample(1, of="a node that is not there")
@pytest.mark.parametrize("static", [False, True])
def test_a_node_that_never_starts_did_not_arrive(job, static):
    job = job(3, static=static)
    for node in job.network.nodes[:2]:
        job.start(node, "check", *TIMEOUT)
    runs = job.finish(WITHIN_S)

    assert [run.code for run in runs] == [STOPPED] * 2
    assert "1 of 3 nodes did not arrive" in runs[0].verdict["statement"]
    assert runs[0].verdict["evidence"] == ["heard from: node-0, node-1"]


@sample(1, of="a node that is not there")
def test_a_node_that_is_cut_off_before_the_start_did_not_arrive(job):
    job = job(3)
    job.network.cut_off(job.network.nodes[2])
    job.start_all("check", *TIMEOUT)
    runs = job.finish(WITHIN_S)

    assert [run.code for run in runs] == [STOPPED] * 3
    assert "1 of 3 nodes did not arrive" in runs[0].verdict["statement"]
    assert runs[0].verdict["evidence"] == ["heard from: node-0, node-1"]


def test_a_node_that_is_cut_off_after_its_arrival_is_named(job):
    job = job(3)
    *others, last = job.network.nodes
    gate, environment = job.gate(last)
    for node in others:
        job.start(node, "launch", *TIMEOUT, script="clean.py")
    job.start(last, "launch", *TIMEOUT, script="clean.py", **environment)
    gate.reached()
    job.network.cut_off(last)
    gate.open()
    runs = job.finish(WITHIN_S)

    assert [run.code for run in runs[:2]] == [PREFLIGHT] * 2, "silence alone is no loss: its stage ends at its deadline"
    verdict = runs[0].verdict
    assert (verdict["kind"], verdict["stage"]) == ("preflight", "allocation")
    assert f"rank 2 ({last.host}) stopped reporting" in verdict["statement"]
    assert "lost the store" in runs[2].stderr or "heard nothing from the store" in runs[2].stderr
    assert runs[2].code != 0


@sample(1, of="a slow link")
def test_a_slow_link_is_named_by_the_bandwidth_stage(job):
    job = job(3)
    _, a, b = job.network.nodes
    job.network.slow(a, b, rate="80mbit")
    job.start_all("check", *TIMEOUT, "--bandwidth-size", "2MiB")
    runs = job.finish(WITHIN_S)

    assert [run.code for run in runs] == [0, 0, 0]
    assert hosts(a, b) in slow_links(runs[0])


@sample(1, of="a slow link")
def test_a_slow_link_fails_where_more_is_asked_for(job):
    job = job(3)
    _, a, b = job.network.nodes
    job.network.slow(a, b, rate="80mbit")
    job.start_all("check", *TIMEOUT, "--bandwidth-size", "2MiB", "--min-busbw", "0.05")
    runs = job.finish(WITHIN_S)

    assert [run.code for run in runs] == [STOPPED] * 3
    assert [finding["stage"] for finding in failures(runs[0])] == ["bandwidth"]
    assert hosts(a, b) in slow_links(runs[0])
    assert "0.05" in runs[0].verdict["statement"]


@sample(1, of="a slow link")
def test_the_only_link_is_slow(job):
    job = job(2)
    a, b = job.network.nodes
    job.network.slow(a, b, rate="80mbit")
    job.start_all("check", *TIMEOUT, "--bandwidth-size", "2MiB", "--min-busbw", "0.05")
    runs = job.finish(WITHIN_S)

    assert [run.code for run in runs] == [STOPPED] * 2
    assert failures(runs[0])[0]["stage"] == "bandwidth"
    assert runs[0].verdict["host"] is None


@sample(1, of="a slow link")
def test_a_late_link_is_named_by_the_bandwidth_stage(job):
    if not can_delay():
        pytest.skip("this kernel has no netem")
    job = job(3)
    _, a, b = job.network.nodes
    job.network.slow(a, b, delay="40ms")
    job.start_all("check", *TIMEOUT, "--bandwidth-size", "2MiB")
    runs = job.finish(WITHIN_S)

    assert [run.code for run in runs] == [0, 0, 0]
    assert hosts(a, b) in slow_links(runs[0])
