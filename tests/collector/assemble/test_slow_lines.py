"""What looks at a slow rank show: a line, if it has most of what the rank takes longer."""

from __future__ import annotations

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.assemble.slow_lines import where_it_was
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.html.page import render_html
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.core.events.agent_events import SeenLine, SlowRankLooks
from gpuwatch.core.events.rank_standing import StackLine
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.messages import EventMessage

from .test_slow_rank_in_report import rank_of

SLEEP = StackLine("/home/me/train.py", 33, "load_batch", "time.sleep(0.2)")
LOOP = StackLine("/home/me/train.py", 50, "main", "for x in loader:")


def looks(number, *lines):
    return SlowRankLooks(RunPosition(2, 0), number, [*lines])


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (looks(46, SeenLine(SLEEP, 41)), "In 41 of 46 looks at its stack it was at train.py:33 in load_batch: `time"),
        (looks(8, SeenLine(LOOP, 8, "__next__ of dataloader.py")), "`for x in loader:`, in __next__ of dataloader.py."),
        (looks(8, SeenLine(StackLine("/x/a.py", 3, "f"), 8)), "it was at a.py:3 in f."),
        (
            looks(10, SeenLine(SLEEP, 5), SeenLine(LOOP, 4)),
            "In 10 looks at its stack it was 5 times at train.py:33 in load_batch: `time.sleep(0.2)` and 4 times at "
            "train.py:50 in main: `for x in loader:`; which line takes longer than on the others is not certain.",
        ),
        (looks(10), "10 looks at its stack show no line of the script."),
    ],
    ids=["one line", "what it calls", "no source", "two lines", "no own line"],
)
def test_a_line_is_named_if_it_has_most_of_the_difference(seen, said):
    assert said in where_it_was(seen, 0.2, 0.05)


@pytest.mark.parametrize(
    ("others_s", "is_named"), [(0.0, True), (0.1, True), (0.15, False), (0.2, False), (0.3, False)]
)
def test_what_the_others_may_do_at_that_line_as_well_is_not_what_it_is_slow_for(others_s, is_named):
    """It is there for 0.17 of its 0.2 s. The others may be there for all of theirs."""
    said = where_it_was(looks(60, SeenLine(SLEEP, 51)), 0.2, others_s)
    assert (said.startswith("In 51 of 60 looks"), "is not certain" in said) == (is_named, not is_named)


@pytest.mark.parametrize("seen", [None, looks(7, SeenLine(SLEEP, 7))])
def test_few_looks_say_nothing(seen):
    assert where_it_was(seen, 0.2, 0.05) == ""


def test_times_that_nobody_knows_name_nothing():
    assert "is not certain" in where_it_was(looks(60, SeenLine(SLEEP, 60)), 0.0, 0.0)


def reported(make, *events):
    messages = []
    for rank in range(4):
        bodies = [make.hello(f"a{rank}", f"h{rank}", nproc=1, nodes=4)]
        bodies += rank_of(make, rank, forward_ms=430 if rank == 2 else 50, waiting_ms=0 if rank == 2 else 380)
        bodies += map(EventMessage, events if rank == 2 else ())
        messages += [(f"a{rank}", n, body) for n, body in enumerate(bodies, 1)]
    return build_report(fold(messages), run_id="x", started=None, ended=None)


def test_text_page_and_json_have_it_from_the_last_count(make):
    counts = [looks(46, SeenLine(SLEEP, 41), SeenLine(LOOP, 5)), looks(40, SeenLine(SLEEP, 36))]
    report = reported(make, *counts)
    (slow,) = report.steps.stragglers
    assert (slow.looks, [(each.line, each.looks) for each in slow.lines]) == (46, [(33, 41), (50, 5)])
    assert slow.lines[0].file == "/home/me/train.py"
    said = "In 41 of 46 looks at its stack it was at train.py:33 in load_batch: `time.sleep(0.2)`."
    assert said in slow.text
    assert said in " ".join(render_text(report).split())
    page = render_html(report)
    assert "In 41 of 46 looks at its stack it was at train.py:33 in load_batch" in page


def test_without_looks_nothing_is_said(make):
    (slow,) = reported(make).steps.stragglers
    assert (slow.looks, slow.lines, "looks" in slow.text) == (0, [], False)
