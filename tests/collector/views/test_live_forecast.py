"""The forecast in the log, for the user and in the report."""

from __future__ import annotations

import json
import math

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.assemble.timeline import forecasts_of
from gpuwatch.collector.facts.fold import FactFold, fold
from gpuwatch.collector.report.html.page import render_html
from gpuwatch.collector.report.model import RunReport, to_json
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.collector.so_far import LiveForecast
from gpuwatch.core.events.agent_events import LimitForecast
from gpuwatch.core.wire.messages import EventMessage


def told(make, rank, module="fc2", batch=112, *, abs_max=4100.0, limit=65504.0):
    where = make.where(rank, batch=batch)
    return EventMessage(LimitForecast(where, module, "Linear", "float16", limit, abs_max, 40, 30, 60, 80))


def hear(bodies, folded=None):
    said = []
    folded = folded or FactFold()
    live = LiveForecast(folded, said.append)
    for n, body in enumerate(bodies, 1):
        folded.add("a0", n, body)
        live.on_message(body)
    return said


def report_of(bodies) -> RunReport:
    return build_report(fold(("a0", n, body) for n, body in enumerate(bodies, 1)), run_id="x", started=None, ended=None)


def test_it_is_said_once_for_a_run(make):
    said = hear([make.hello(), told(make, 1), told(make, 0), told(make, 1, "")])
    assert said == [
        "rank 1: outputs grow towards float16's limit of 65504: in batch 112 `fc2` was at 4.10e+03 and would pass it "
        "in about 40 batches (30 to 60), if it goes on as since batch 80 [GW204]"
    ]


def test_a_collector_that_was_started_again_does_not_say_it_again(make):
    folded = FactFold()
    folded.add("a0", 1, told(make, 1))
    assert hear([told(make, 0)], folded) == []


@pytest.mark.parametrize("number", [math.nan, math.inf, 0.0, -1.0])
def test_numbers_that_no_agent_sends_are_not_told(make, number):
    bodies = [make.hello(), told(make, 1, abs_max=number), told(make, 0, limit=number)]
    assert hear(bodies) == []
    report = report_of(bodies)
    assert (report.forecasts, report.insights) == ([], [])


def test_a_module_stands_once_with_all_ranks_that_told_it(make):
    bodies = [make.hello(), told(make, 1), told(make, 0, batch=116), told(make, 0, "", 112)]
    facts = fold(("a0", n, body) for n, body in enumerate(bodies, 1))
    found = forecasts_of(facts.of_attempt(0))
    assert [(each.module, each.ranks, each.rank, each.batch) for each in found] == [
        ("fc2", [0, 1], 1, 112),
        ("", [0], 0, 112),
    ]


def test_it_is_one_line_of_the_report(make):
    report = report_of([make.hello(), told(make, 1), told(make, 0, "<b>")])
    (insight,) = report.insights
    assert insight.text == (
        "outputs of `<b>` and `fc2` grew towards float16's limit of 65504 on both ranks: in batch 112 of rank 0, `<b>` "
        "was at 4.10e+03 and would pass it in about 40 batches (30 to 60)"
    )
    assert "and would pass it in about 40 batches" in " ".join(render_text(report).split())
    page = render_html(report)
    assert (
        "and would pass it in about 40 batches" in page
        and "<b>" not in page.split("Close to trouble")[1].split("</ul>")[0]
    )
    assert json.loads(to_json(report))["forecasts"][0]["earliest"] == 30


def test_the_verdict_is_the_same_and_the_line_says_that_it_came(make):
    batch = make.Batch(1, batch=150)
    batch.call("fc2", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    bodies = [make.hello(), *batch.messages(), make.ended(1, 1)]
    report = report_of([*bodies, told(make, 1)])
    assert report.verdict == report_of(bodies).verdict
    assert report.insights[0].text.endswith("; `fc2` overflowed in batch 150")
