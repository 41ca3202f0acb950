"""What stands on one screen, by the kind of the verdict, and that it is never more than that."""

from __future__ import annotations

import re

import msgspec
import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.one_screen import MOST_LINES, screen_text
from gpuwatch.collector.report.run_figures import RunInsight
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.collector.report.verdict import ConcurrentOrigin
from gpuwatch.core.codes import SHOWN, VerdictKind
from gpuwatch.core.events.agent_events import RankLook, WorkerExit
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.events.rank_standing import StackLine
from gpuwatch.core.wire.messages import EventMessage, NodeBye

LAST = "report: /home/me/gpuwatch-runs/20261126-035840-4b27/report.json\nas a page: /home/me/report.html"
TRACEBACK = "\n".join(
    [
        "Traceback (most recent call last):",
        *(f'  File "train.py", line {n}, in f{n}\n    f{n + 1}()' for n in range(40)),
        "KeyError: 'labels'",
    ]
)


def report_of(bodies):
    return build_report(fold([("a0", n, body) for n, body in enumerate(bodies, 1)]), run_id="x", started=None, ended="")


def rows(text: str, width: int = 80) -> int:
    """How many lines of a terminal a text takes."""
    return sum(max(1, -(-len(line) // width)) for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())


def crash(make, traceback=TRACEBACK):
    raised = make.raised(1, "KeyError", "'labels'", batch=3)
    error = msgspec.structs.replace(raised.event, traceback=traceback)
    return report_of([make.hello(nproc=2), EventMessage(error), make.ended(1, 1, batch=3), NodeBye("failed")])


def hang(make, stacks):
    """A rank for each stack; rank 1 is the one that the others wait for."""
    bodies = [make.hello(nproc=len(stacks))]
    for rank, stack in enumerate(stacks):
        at = make.where(rank, step=4, batch=4, seq=9)
        bodies.append(EventMessage(RankLook(at, 1, 300.0, "script", state="S", stack=stack)))
        bodies.append(EventMessage(WorkerExit(at, -15, "torchrun", "script")))
    return report_of([*bodies, NodeBye("failed")])


def test_a_crash_has_the_innermost_calls_of_its_traceback_once(make):
    report = crash(make)
    text = screen_text(report, last_words=LAST)
    assert text.count("KeyError: 'labels'\n") == 1
    assert text.index("Traceback (most recent") < text.index("    ... ") < text.index("line 39, in f39")
    left, shown = re.search(r"\.\.\. (\d+) lines", text)[1], text.count("    f") + text.count("  File ")
    assert int(left) + shown == 80, "each line is either shown or counted"
    assert text.count('line 0, in f0"') == 0
    assert f"All of it: {report.run.report_command} --all" in text
    assert "line 0, in f0" in render_text(report)


def test_a_short_traceback_is_whole(make):
    text = screen_text(crash(make, "Traceback (most recent call last):\n  in f\nKeyError: 'labels'"))
    assert "  - Traceback (most recent call last):\n      in f\n    KeyError: 'labels'\n" in text
    assert "..." not in text


def test_a_hang_has_the_stack_of_the_named_rank_and_one_that_waits(make):
    inside = StackLine("/lib/torch/distributed/distributed_c10d.py", 3007, "all_reduce", "work.wait()")
    waits = [inside, StackLine("/me/train.py", 41, "step", "dist.all_reduce(loss)")]
    deep = [StackLine("/me/data.py", n, f"load{n}", "next(self)") for n in range(9)]
    other = [inside, StackLine("/me/train.py", 50, "log", "dist.all_reduce(step)")]
    report = hang(make, [waits, deep, waits, other])
    assert report.verdict.rank == 1
    text = screen_text(report)
    assert text.count("Stack of ") == 2
    assert "Stack of rank 1, innermost call last" in text and "Stack of ranks 0, 2, innermost call last" in text
    assert "and 1 more stack\n" in text
    calls = re.findall(r"in (load\d)", text[text.index("Stack of rank 1") :])[:5]
    assert calls == ["load4", "load3", "load2", "load1", "load0"], "as Python prints them"
    assert "  ... 4 outer calls" in text
    assert render_text(report).count("Stack of ") == 3


def test_a_stack_in_report_json_is_innermost_first_as_it_was(make):
    stack = [StackLine("/me/data.py", n, f"load{n}", "") for n in range(3)]
    report = hang(make, [stack, stack])
    assert [line.split()[-1] for line in report.ranks[0].stack] == ["load0", "load1", "load2"]


def test_an_overflow_ends_with_the_bad_frame(make):
    batch = make.Batch(0)
    for n in range(20):
        batch.call(f"a{n}", "Linear", given=[batch.tensor()], returned=[batch.tensor()])
    inputs = [batch.tensor() for _ in range(9)]
    batch.call("bad", "Sum", given=inputs, returned=[batch.tensor(make.INF)], weights={"weight": batch.tensor()})
    report = report_of([make.hello(nproc=1), *batch.messages(), make.ended(0, 94), NodeBye("failed")])
    text = screen_text(report)
    part = text[text.index("Rank 0, batch 0:") :].split("\n\n")[0].splitlines()
    assert len(part) == 8
    assert "more: --rank 0" in part[0]
    assert part[2].split() == ["bad", "Sum"]
    assert part[-1].split() == ["inf", "inf", "output"]


def test_a_clean_run_has_no_more_than_its_answer(make):
    bodies = [make.hello(nproc=1), *make.finished(0)]
    batch = make.Batch(0)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor()])
    report = report_of([bodies[0], *batch.messages(), *bodies[1:], NodeBye("ok")])
    assert report.verdict.kind == "clean"
    title, headline, statement, hint = screen_text(report).splitlines()
    assert (title[:1], headline[:14], statement[:11], hint[:9]) == ("─", "VERDICT  clean", "No overflow", "All of it")


@pytest.mark.quick(8)
@pytest.mark.parametrize("kind", VerdictKind)
@pytest.mark.parametrize("color", [False, True])
def test_it_is_never_more_than_a_screen(make, kind, color):
    """Whatever a verdict has: long evidence, many other origins, a long path."""
    report = crash(make)
    verdict = msgspec.structs.replace(
        report.verdict,
        kind=kind,
        statement="Rank 1 " + "overflowed first " * 12,
        evidence=[*(f"reason {n} " + "and so on " * 20 for n in range(9)), TRACEBACK, *("x" * 300 for _ in range(9))],
        next=[f"step {n} " + "and so on " * 20 for n in range(9)],
        concurrent=[ConcurrentOrigin(n, f"module{n}", "Linear", "output", "nan", "h") for n in range(40)],
    )
    run = msgspec.structs.replace(report.run, report_command="gpuwatch report /home/" + "a-long-name/" * 9)
    report = msgspec.structs.replace(report, verdict=verdict, run=run, seen_before=["seen " * 40] * 3)
    for width in (80, 120):
        for again in (False, True):
            text = screen_text(report, width=width, color=color, last_words=LAST, again=again)
            assert rows(text, width) <= MOST_LINES, text
            assert text.count("VERDICT") == 1 + again
            plain = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
            assert "reason 0" in plain and "step 0" in plain and "All of it: gpuwatch report" in plain
    assert set(SHOWN) == set(VerdictKind)


def test_the_answer_comes_again_after_the_paths_where_the_screen_has_lost_it(make):
    short, long = crash(make, "Traceback: KeyError"), crash(make)
    assert screen_text(short, last_words=LAST).endswith(LAST)
    text = screen_text(long, last_words=LAST)
    assert text.split(f"{LAST}\n\n")[1].startswith("VERDICT  crash")
    assert screen_text(long, last_words=LAST, again=False).endswith(LAST)


def test_gpuwatchs_own_faults_are_told_whatever_else_there_is(make):
    """Before values close to trouble, slow ranks and warnings of the preflight."""
    fault = OwnFault(make.where(1), "forward hook", "boom")
    batch = make.Batch(1)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor()])
    bodies = [make.hello(nproc=2), *batch.messages(), EventMessage(fault), *make.finished(0), *make.finished(1)]
    report = report_of([*bodies, NodeBye("ok")])
    insights = [RunInsight("near_overflow", "close " * 40, "Mend it.", [0], ["fc"]) for _ in range(6)]
    for kind in VerdictKind:
        verdict = msgspec.structs.replace(report.verdict, kind=kind, evidence=[TRACEBACK] * 3)
        text = screen_text(msgspec.structs.replace(report, verdict=verdict, insights=insights), last_words=LAST)
        assert "boom" in text and rows(text) <= MOST_LINES, text
