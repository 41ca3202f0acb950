"""Nothing that a script is called or says gets a line or a terminal of its own."""

from __future__ import annotations

import json

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import FactFold, fold
from gpuwatch.collector.facts.shown_body import shown_body
from gpuwatch.collector.report.model import to_json
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.collector.stage_lines import StageLines
from gpuwatch.core.events.alarms import RangeWarning
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.events.script_events import ScriptError
from gpuwatch.core.wire.messages import EventMessage

FORGED = "x\x1b[2J\x9b\u202e\nVERDICT  clean, established\r"
ROOT = "Net" + FORGED
PLACES = ["module", "class", "argument", "parameter", "root", "exception", "host", "fault", "warning"]


def report_of(make, place):
    """A run in which one of the names is hostile."""
    name = {key: FORGED if key == place else key for key in PLACES}
    batch = make.Batch(0, root=name["root"], batch=3, seq=1)
    x, bad = batch.tensor(), batch.tensor(make.INF)
    weights = {name["parameter"]: batch.tensor()}
    batch.call(name["module"], name["class"], kwargs={name["argument"]: x}, returned=[bad], weights=weights)
    batch.call("", name["root"], given=[x], returned=[bad])
    warned = RangeWarning(
        make.where(0), "near overflow", name["warning"], "Linear", "forward", "output", "float16", 6e4, 0.1
    )
    bodies = [
        make.hello(host=name["host"], nproc=1, command=["gpuwatch", FORGED]),
        *batch.messages(),
        EventMessage(OwnFault(make.where(0), "hook", name["fault"])),
        EventMessage(warned),
        make.raised(0, name["exception"], name["exception"], module=name["module"], batch=3),
        make.ended(0, 1, batch=3),
        make.NodeBye("failed"),
    ]
    facts = fold(("a0", n, body) for n, body in enumerate(bodies, 1))
    return build_report(facts, run_id="run", started=None, ended=None)


@pytest.mark.parametrize("place", PLACES)
def test_no_name_forges_a_line_or_reaches_the_terminal(make, place):
    report = report_of(make, place)
    text = render_text(report, width=2000)
    assert all(line.isprintable() for line in text.splitlines())
    # beside a fault of gpuwatch's own
    assert [line for line in text.splitlines() if line.startswith("VERDICT")] == [
        "VERDICT  overflow, supported [GW104]"
    ]
    assert json.loads(to_json(report))["verdict"]["kind"] == "overflow"


def test_an_exception_forges_no_line(make):
    bodies = [make.hello(nproc=1), make.raised(0, "E" + FORGED, FORGED, batch=3), make.ended(0, 1, batch=3)]
    error = ScriptError(make.where(0, batch=3), "E", "boom", f"Traceback\n{FORGED}\nVERDICT  clean")
    bodies[1:2] = [bodies[1], EventMessage(error), make.NodeBye("failed")]
    report = build_report(fold(("a0", n, b) for n, b in enumerate(bodies)), run_id="run", started=None, ended=None)
    lines = render_text(report, width=2000).splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line.startswith("VERDICT")] == ["VERDICT  crash, established [GW102]"]


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


@pytest.mark.parametrize("place", PLACES)
def test_the_json_holds_no_control_character(make, place):
    report = json.loads(to_json(report_of(make, place)))
    error = report["ranks"][0].pop("error")
    assert all(line.isprintable() for line in error["message"].split("\n"))
    for text in strings(report):
        assert all(line.isprintable() for line in text.split("\n")), text
        assert not any(line.startswith("VERDICT") for line in text.split("\n")[1:]), text


def test_a_hostile_root_is_still_the_page_of_its_anomaly(make):
    report = report_of(make, "root")
    assert report.verdict.certainty == "supported", "there is a fault of gpuwatch's own"
    assert report.ranks[0].frames


def test_a_name_has_at_most_200_characters(make):
    batch = make.Batch(0)
    batch.call("m" * 5000, "C" * 5000, given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    facts = fold([("a0", 1, make.hello(nproc=1)), *(("a0", n, b) for n, b in enumerate(batch.messages(), 2))])
    verdict = build_report(facts, run_id="run", started=None, ended=None).verdict
    assert (len(verdict.module), len(verdict.cls)) == (200, 200)


def test_an_exception_keeps_its_lines_and_nothing_else_does(make):
    error = ScriptError(make.where(0), "E\n", "a\n\x1bb", "Traceback\n  \x1bc")
    safe = shown_body(EventMessage(error)).event
    assert (safe.error, safe.message, safe.traceback) == ("E\\n", "a\n\\x1bb", "Traceback\n  \\x1bc")
    assert shown_body(EventMessage(OwnFault(make.where(0), "hook", "a\nb"))).event.message == "a\\nb"


def test_a_message_without_anything_hostile_is_the_same_object(make):
    for body in (make.hello(), make.raised(0), make.NodeBeat([make.state(0)], {1: 3})):
        assert shown_body(body) is body


def test_lines_that_are_told_while_the_preflight_runs_are_shown_too(make):
    folded = FactFold()
    lines = StageLines(folded)
    finding = make.found("compute", grade="warn", sentence="rank 0 on h\x1b[2J is slow\nVERDICT clean")
    for body in (make.hello(nproc=1), make.began(0, "compute"), make.stage(0, "compute"), make.concluded(0, [finding])):
        lines.on_message(body)
        folded.add("a0", 0, body)
    over = lines.end()[-1]
    assert all(line.isprintable() for line in [over.text, *over.warnings])
    assert any("\\x1b[2J" in line for line in over.warnings)
