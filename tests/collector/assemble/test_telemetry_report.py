"""The figures of the nodes in a report: around the event, by each host's own clock, with no say in the verdict."""

from __future__ import annotations

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.assemble.node_telemetry import MOST_ALIKE, MOST_NODES, MOST_POINTS
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.model import to_json
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.core.events.agent_events import RankLook
from gpuwatch.core.events.rank_standing import StackLine
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.messages import AgentMessage, EventMessage, decode_agent, encode
from msgspec.structs import replace

S = 10**9
EVENT_S = 1200.0
"""The figures begin at 1000 s."""
STEALS = {("", "steal"): [5 * 0.3 * n for n in range(60)], ("", "cpu"): [5 * 0.5 * n for n in range(60)]}
QUIET = {("", "steal"): [0.0] * 60, ("", "cpu"): [5 * 0.5 * n for n in range(60)]}


def overflow(make, rank=0, *, clock_s=0.0):
    """Its host's clock is behind by `clock_s`."""
    batch = make.Batch(rank, time_ns=round((EVENT_S - clock_s) * S))
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    return [*batch.messages(), make.ended(rank, 94), make.NodeBye("failed")]


def report_of(*messages):
    bodies = [(agent, n, body) for n, (agent, body) in enumerate(messages, 1)]
    wired = [(agent, n, decode_agent(encode(AgentMessage(n, body))).body) for agent, n, body in bodies]
    return build_report(fold(wired), run_id="x", started=None, ended=None)


def of_node(agent, *bodies):
    return [(agent, body) for body in bodies]


def test_what_stands_out_is_told_from_the_event(make):
    figures = make.telemetry(STEALS)
    report = report_of(*of_node("a0", make.hello(nproc=1), figures, *overflow(make)))
    assert (report.telemetry.event, report.telemetry.event_time) == ("the overflow", "1970-01-01T00:20:00Z")
    (notable,) = report.telemetry.notable
    assert (notable.host, notable.of, notable.what, notable.value, notable.unit) == ("h0", "", "steal", 0.3, "share")
    assert -120 <= notable.at_s <= 30
    text = " ".join(render_text(report).split())
    assert "Node telemetry - h0: other virtual machines took 30% of its processors (steal)," in text
    (node,) = report.telemetry.nodes
    assert node.at_s[0] >= -300
    assert node.at_s[-1] <= 60
    steal = next(figure for figure in node.figures if figure.what == "steal")
    assert set(steal.values[1:]) == {0.3}
    assert len(node.at_s) <= MOST_POINTS


def test_it_changes_no_verdict(make):
    job = of_node("a0", make.hello(nproc=1), *overflow(make))
    assert report_of(*job, ("a0", make.telemetry(STEALS))).verdict == report_of(*job).verdict
    assert report_of(*job).telemetry is None


def test_a_clean_run_has_figures_and_nothing_stands_out(make):
    batch = make.Batch(0)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor()])
    job = [make.hello(nproc=1), *batch.messages(), *make.finished(0), make.telemetry(STEALS), make.NodeBye("ok")]
    report = report_of(*of_node("a0", *job))
    assert report.verdict.kind == "clean"
    assert (report.telemetry.event, report.telemetry.notable) == ("", [])
    (node,) = report.telemetry.nodes
    assert node.at_s[-1] == -1.0, "before its last message"
    assert "Node telemetry" not in render_text(report)


def test_clocks_of_hosts_are_brought_together(make):
    """h1's clock is 500 s ahead of h0's: its steal was 100 s before the overflow on h0."""
    steal = [0.0 if n < 20 else 2.0 for n in range(60)]
    far = make.telemetry({("", "steal"): steal}, began_s=1500.0)
    job = [
        *of_node("a0", make.hello(nproc=1), make.NodeBeat([], {}, 1, 0, 10), make.telemetry(QUIET), *overflow(make)),
        *of_node("a1", make.hello("a1", "h1", nproc=1), make.NodeBeat([], {}, 1, -500 * S, 10), far),
    ]
    (notable,) = report_of(*job).telemetry.notable
    assert (notable.host, notable.at_s) == ("h1", -100.0)
    assert notable.text == "h1: other virtual machines took 40% of its processors (steal), 100 s before the overflow"


def test_a_stall_began_when_the_rank_last_moved(make):
    waits = [StackLine("/home/me/train.py", 41, "step", "dist.all_reduce(loss)")]
    job = [make.hello(nproc=3)]
    for rank in range(3):
        stack = [StackLine("/home/me/data.py", 7, "load")] if rank == 1 else waits
        where = RunPosition(rank, step=4, batch=4, seq=9, time_ns=round((EVENT_S + 60) * S))
        look = RankLook(where, 1, 60.0, "script", state="S", stack=stack)
        job += [EventMessage(look), make.ended(rank, -15, "torchrun", batch=4, step=4, seq=9)]
    report = report_of(*of_node("a0", *job, make.telemetry(STEALS), make.NodeBye("failed")))
    assert report.verdict.kind == "hang"
    assert (report.telemetry.event, report.telemetry.event_time) == ("the stall", "1970-01-01T00:20:00Z")


def test_a_rank_that_was_lost_ended_then(make):
    ended = make.ended(0, -9)
    ended = EventMessage(replace(ended.event, ended_ns=round(EVENT_S * S)))
    report = report_of(*of_node("a0", make.hello(nproc=1), ended, make.telemetry(STEALS), make.NodeBye("failed")))
    assert report.verdict.kind == "lost"
    assert report.telemetry.event == "the end of rank 0"
    assert report.telemetry.notable


def test_a_later_message_has_all_of_the_one_before_and_an_agent_that_was_started_again_goes_on(make):
    first = make.telemetry({("", "steal"): [0.0, 1.0]})
    later = make.telemetry({("", "steal"): [0.0, 1.0, 2.0]})
    second = make.telemetry({("", "steal"): [7.0, 9.0]}, began_s=1100.0)
    for messages in ([first, later, second], [second, later, first], [later, second, later]):
        job = [*of_node("a0.0", make.hello(nproc=1), *messages[:1]), *of_node("a0.1", *messages[1:], *overflow(make))]
        (node,) = report_of(*job).telemetry.nodes
        assert node.at_s == [-200.0, -195.0, -190.0, -100.0, -95.0]
        assert node.figures[0].values == [None, 0.2, 0.2, None, 0.4]


@pytest.mark.parametrize("samples", [b"", b"x", None])
def test_figures_that_cannot_be_read_cost_nothing_else(make, samples):
    good = make.telemetry(STEALS)
    bad = replace(good, samples=samples) if samples is not None else replace(good, series=[])
    report = report_of(*of_node("a0", make.hello(nproc=1), bad, *overflow(make)))
    assert report.verdict.kind == "overflow"
    assert (report.telemetry.nodes, report.telemetry.trouble) == ([], "")


def test_many_nodes_alike_are_counted(make):
    job = of_node("a5", *overflow(make, 5))
    for node in range(20):
        figures = make.telemetry(STEALS)
        job += of_node(f"a{node}", make.hello(f"a{node}", f"h{node}", nproc=1, nodes=20), figures)
    report = report_of(*job)
    assert (report.telemetry.notable[0].host, report.telemetry.notable[0].alike) == ("h5", 19)
    assert len(report.telemetry.notable) == MOST_ALIKE
    assert "(steal), at the overflow; the same on 19 other nodes" in " ".join(render_text(report).split())


def test_of_many_nodes_the_named_one_and_those_that_stand_out_are_shown(make):
    gpus = {
        (f"GPU-{gpu}", what): [40.0 + gpu] * 60 for gpu in range(8) for what in ("temperature", "power", "sm_clock")
    }
    job = of_node("a5", *overflow(make, 5))
    for node in range(128):
        figures = make.telemetry({**gpus, **(STEALS if node == 77 else QUIET)})
        job += of_node(f"a{node}", make.hello(f"a{node}", f"h{node}", nproc=1, nodes=128), figures)
    report = report_of(*job)
    assert [node.host for node in report.telemetry.nodes][:2] == ["h5", "h77"]
    assert len(report.telemetry.nodes) == MOST_NODES
    assert report.telemetry.nodes_left_out == 128 - MOST_NODES
    assert [notable.host for notable in report.telemetry.notable] == ["h77"]
    assert len(to_json(report)) < 1 << 19
