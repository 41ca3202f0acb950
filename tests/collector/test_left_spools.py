"""What nodes have left beside a run, as its collector never heard them."""

from __future__ import annotations

import os
from contextlib import closing

import pytest
from gpuwatch.collector.finish import open_store, report_from_store, write_report
from gpuwatch.collector.left_spools import has_new_spools
from gpuwatch.collector.run_files import RunPaths, new_run
from gpuwatch.core.events.node_events import AttemptNodes
from gpuwatch.core.wire.messages import AgentMessage, EventMessage, NodeBye, encode
from gpuwatch.core.wire.spool import SpoolWriter

HOSTS = ["n0", "n1"]
OURS = AttemptNodes(0, "3f1c0a77b2de-0", HOSTS)


def heard(paths: RunPaths, bodies) -> None:
    with closing(open_store(paths, 21)) as store:
        for n, body in enumerate(bodies, 1):
            message = AgentMessage(n, body, 0)
            store.add("a0.0", message, encode(message))


def left(paths: RunPaths, bodies, name: str = "a1.0") -> None:
    spool = SpoolWriter(paths.folder.parent / f"agent-{name[:2]}.spool")
    for n, body in enumerate(bodies, 1):
        spool.append(encode(AgentMessage(n, body, 0)), is_page=False)
    spool.close()


def head(make, attempt=OURS):
    events = [EventMessage(attempt)] if attempt is not None else []
    return [make.hello("a0.0", "n0", nproc=1, nodes=2), *events, make.raised(0, peer=True), *make.broken_off(0)]


def other(make, attempt=OURS):
    batch = make.Batch(1)
    batch.call("fc1", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    return [
        make.hello("a1.0", "n1", nproc=1, nodes=2),
        EventMessage(attempt),
        *batch.messages(),
        *make.broken_off(1, 94),
        NodeBye("failed"),
    ]


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    return new_run(tmp_path / "runs with a space")


def test_a_node_that_was_never_heard_is_named_and_what_it_did_is_not_guessed(paths, make):
    heard(paths, [*head(make), NodeBye("failed")])
    verdict = report_from_store(paths).verdict

    assert (verdict.kind, verdict.certainty) == ("lost", "unknown")
    assert "n1 was never heard from: what its ranks did is not here" in verdict.evidence
    assert verdict.next[0].startswith("What n1 recorded is there in a .spool file in --runs-dir")
    assert f"gpuwatch report '{paths.folder}'" in verdict.next[0]
    assert not any("No rank ended for a reason of its own" in step for step in verdict.next)


def test_its_spool_beside_the_run_is_read_with_it(paths, make):
    heard(paths, [*head(make), NodeBye("failed")])
    left(paths, other(make))
    report = report_from_store(paths)

    assert (report.verdict.kind, report.verdict.rank, report.verdict.host) == ("overflow", 1, "n1")
    assert {node.host: node.spool for node in report.nodes} == {"n0": "", "n1": "agent-a1.spool"}
    assert [frame.module for frame in report.ranks[1].frames] == ["fc1"]
    assert not any("never heard" in line for line in report.verdict.evidence)


@pytest.mark.parametrize("attempt", [AttemptNodes(0, "another-0", HOSTS), AttemptNodes(1, "another-1", HOSTS)])
def test_a_spool_of_another_job_is_not(paths, make, attempt):
    heard(paths, [*head(make), NodeBye("failed")])
    left(paths, other(make, attempt))
    report = report_from_store(paths)

    assert report.verdict.kind == "lost"
    assert [node.host for node in report.nodes] == ["n0"]


def test_none_is_looked_for_where_all_nodes_were_heard(paths, make):
    one = AttemptNodes(0, "3f1c0a77b2de-0", ["n0"])
    heard(paths, [*head(make, one), NodeBye("failed")])
    left(paths, other(make))

    assert [node.host for node in report_from_store(paths).nodes] == ["n0"]


@pytest.mark.parametrize("content", [b"", b"gpuwatch spool 1\n", b"something else", b"gpuwatch spool 1\n\xff\x00" * 9])
def test_a_spool_that_is_damaged_costs_nothing(paths, make, content):
    heard(paths, [*head(make), NodeBye("failed")])
    (paths.folder.parent / "agent-a1.spool").write_bytes(content)
    (paths.folder.parent / "agent-a2.spool").mkdir()

    assert report_from_store(paths).verdict.kind == "lost"


def test_another_users_spool_is_left_alone(paths, make, monkeypatch):
    heard(paths, [*head(make), NodeBye("failed")])
    left(paths, other(make))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    assert report_from_store(paths).verdict.kind == "lost"


def test_a_spool_that_comes_after_the_report_has_it_made_again(paths, make):
    heard(paths, [*head(make), NodeBye("failed")])
    assert not has_new_spools(paths)
    assert write_report(paths, report_from_store(paths)) is None
    assert not has_new_spools(paths)
    left(paths, other(make))
    assert has_new_spools(paths)
    assert write_report(paths, report_from_store(paths)) is None
    assert not has_new_spools(paths)


def test_the_first_failure_is_no_more_than_supported_without_a_node(paths, make):
    heard(paths, [*head(make)[:2], make.raised(0), *make.broken_off(0), NodeBye("failed")])
    verdict = report_from_store(paths).verdict

    assert (verdict.kind, verdict.rank, verdict.certainty) == ("crash", 0, "supported")
