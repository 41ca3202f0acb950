"""What became of a rank, as a reader of the table sees it."""

from __future__ import annotations

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.html.page import render_html
from gpuwatch.collector.report.rank_states import state_text
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.core.events.script_events import ScriptExit
from gpuwatch.core.wire.messages import EventMessage, NodeBye


def report_of(bodies):
    return build_report(fold([("a0", n, body) for n, body in enumerate(bodies, 1)]), run_id="x", started=None, ended="")


def bad_batch(make):
    batch = make.Batch(0)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    return batch.messages()


def left(make, code, handler=0):
    """Its script called sys.exit, in the handler of a signal or by itself."""
    return EventMessage(ScriptExit(make.where(0), code, handler=handler))


@pytest.mark.parametrize(
    ("end", "state", "text"),
    [
        (lambda make: [make.ended(0, -15, "torchrun")], "stopped", "stopped by torchrun"),
        (lambda make: [make.ended(0, -9, "torchrun")], "stopped", "stopped by torchrun"),
        (lambda make: [left(make, 0), make.ended(0, -15, "torchrun")], "finished", "finished"),
        (lambda make: [left(make, 3), make.ended(0, -15, "torchrun")], "failed", "ended with code 3"),
        (lambda make: [left(make, 3), make.ended(0, 3, "torchrun")], "failed", "ended with code 3"),
        (lambda make: [left(make, 3, handler=15), make.ended(0, 3, "torchrun")], "stopped", "stopped by torchrun"),
        (lambda make: [make.ended(0, -9)], "killed", "killed (SIGKILL)"),
        (lambda make: [make.ended(0, -11)], "killed", "killed (SIGSEGV)"),
        (lambda make: [make.ended(0, -40)], "killed", "killed (signal 40)"),
        (lambda make: [make.raised(0, "KeyError", "'a'"), make.ended(0, 1)], "raised", "raised KeyError"),
        (lambda make: [make.raised(0, "KeyError", "'a'"), make.ended(0, -15, "torchrun")], "raised", "raised KeyError"),
        (lambda make: [make.ended(0, 3)], "failed", "ended with code 3"),
        (lambda make: [make.ended(0, 94)], "failed", "ended with code 94"),
        (lambda make: [*bad_batch(make), make.ended(0, 94)], "failed", "ended at its overflow"),
        (lambda make: make.finished(0), "finished", "finished"),
    ],
)
def test_a_state_in_words(make, end, state, text):
    report = report_of([make.hello(nproc=1), *end(make), NodeBye("failed")])
    (rank,) = report.ranks
    assert rank.state == state, "report.json keeps its words"
    assert state_text(rank, "torchrun") == text
    assert text in render_text(report, width=200) and text in render_html(report)


def test_who_has_started_the_ranks_is_who_stops_them(make):
    hello = make.hello(nproc=1, starter="the command")
    report = report_of([hello, make.ended(0, -15, "torchrun"), NodeBye("failed")])
    assert "stopped by the command" in render_text(report, width=200)
