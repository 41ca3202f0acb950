"""What is said of ranks that ran on when their launch was killed, and what is not."""

from __future__ import annotations

import signal

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.html.page import render_html
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.collector.views.snapshot import state_of, view_of
from gpuwatch.core.events.node_events import NodeSignal
from gpuwatch.core.wire.beat import NodeBeat
from gpuwatch.core.wire.messages import EventMessage, NodeBye

KILLED = EventMessage(NodeSignal(signal.SIGKILL))
FAILED = NodeBye("failed", signal.SIGKILL)


def left(make, rank, by="running", *, known=True):
    """A rank whose launch was killed; its process has the id 70 more than its number."""
    beat = [NodeBeat([make.state(rank, pid=70 + rank, phase="script", batch=19, final=True)], {})] if known else []
    return [*beat, make.ended(rank, None, by, batch=19)]


def told(*nodes):
    return [(f"a{at}", n, body) for at, bodies in enumerate(nodes) for n, body in enumerate(bodies, 1)]


def of_one_node(make, *ends):
    return told([make.hello(host="vm", nproc=len(ends)), *(body for end in ends for body in end), KILLED, FAILED])


def test_ranks_that_ran_on_are_named_with_how_to_end_them(make):
    verdict = decide(fold(of_one_node(make, left(make, 0), left(make, 1))))

    assert (verdict.kind, verdict.signal) == ("interrupted", "SIGKILL")
    assert verdict.statement == (
        "The launch on vm was killed, and ranks 0 and 1 (process ids 70 and 71) were still running then; "
        "no overflow had been seen."
    )
    assert verdict.evidence == [
        f"rank {rank}: running when the launch was killed, outside of a forward, after batch 19" for rank in (0, 1)
    ]
    assert verdict.next[0] == (
        "Ranks 0 and 1 were running when the launch was killed, and nothing ends them. "
        "Look on vm whether they still run: ps -p 70,71; to end them: kill 70 71"
    )


def test_nothing_says_that_they_ended_or_were_stopped(make):
    messages = of_one_node(make, left(make, 0), left(make, 1))
    report = build_report(fold(messages), run_id="x", started=None, ended="")

    assert [rank.state for rank in report.ranks] == ["running", "running"]
    for text in (render_text(report, width=200), render_html(report)):
        assert "running when the launch was killed" in text
        assert "stopped by" not in text
        assert "ended with" not in text


def test_of_those_that_are_gone_nothing_new_is_said(make):
    """As of all ranks in stores from before: `by` was `torchrun` there."""
    verdict = decide(fold(of_one_node(make, left(make, 0, "unknown"), left(make, 1, "torchrun"))))

    assert verdict.statement == "The run was ended from outside by SIGKILL; no overflow had been seen."
    assert not any("kill " in step for step in verdict.next)


def test_only_the_one_that_ran_on_is_named(make):
    verdict = decide(fold(of_one_node(make, left(make, 0, "unknown"), left(make, 1))))

    assert "rank 1 (process id 71) was still running then" in verdict.statement
    assert "whether it still runs: ps -p 71; to end it: kill 71" in verdict.next[0]


def test_each_host_has_its_own_command(make):
    nodes = [
        [make.hello(f"a{at}", f"h{at}", 1, 2), *left(make, at), EventMessage(NodeSignal(9)), FAILED] for at in range(2)
    ]
    verdict = decide(fold(told(*nodes)))

    assert "rank 0 (process id 70) on h0 and rank 1 (process id 71) on h1" in verdict.statement
    assert [step.rpartition(": ")[2] for step in verdict.next[:2]] == ["kill 70", "kill 71"]


def test_without_a_process_id_the_step_says_how_to_find_it(make):
    verdict = decide(fold(of_one_node(make, left(make, 0), left(make, 1, known=False))))

    assert "ranks 0 and 1 were still running" in verdict.statement
    assert "pgrep -fa gpuwatch.worker" in verdict.next[0]


@pytest.mark.parametrize(("by", "shown"), [("running", True), ("torchrun", False)])
def test_viewers_see_that_it_runs(make, by, shown):
    (rank,) = view_of(fold(of_one_node(make, left(make, 0, by))), "run-1", 7).ranks
    assert rank.runs_on == shown
    assert (state_of(rank, set()) == "running") == shown
