"""The line of an operation in the text: cut around the operation, which is always there."""

from __future__ import annotations

import doctest
import re

import msgspec
import pytest
from gpuwatch.collector.report.one_screen import screen_text
from gpuwatch.collector.report.operation_line import evidence_lines
from gpuwatch.collector.report.text_report import render_text, verdict_text
from gpuwatch.core import marked_line
from gpuwatch.core.marked_line import cut_line
from hypothesis import example, given
from hypothesis import strategies as st

PART = "s.q(h) @ s.k(y).transpose(-2, -1)"
LONG = (
    f'h = s.n(x); y = {{"one": h, "größe": x}}["größe"]; a = {PART} * 0.5; '
    "a = a.masked_fill(~mask, -1e9); return s.o(a.softmax(-1) @ h)"
)


def columns_in(code, part=PART):
    return code.index(part), code.index(part) + len(part)


TEXTS = [render_text, screen_text, lambda report, width: verdict_text(report.verdict, width=width)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", [60, 80, 110])
def test_the_operation_is_on_one_line_of_each_text(report_of_line, text, width):
    shown = text(report_of_line(LONG, columns_in(LONG)), width=width)
    (line,) = [line for line in shown.splitlines() if PART in line]
    assert len(line) <= width
    assert re.fullmatch(r"  - `\.\.\.[^.].*[^.]\.\.\.`,( train\.py:12,)?.*", line), line


def test_the_line_of_a_wide_terminal_is_whole(report_of_line):
    assert f"`{LONG}`, train.py:12" in render_text(report_of_line(LONG, columns_in(LONG)), width=300)


def test_the_report_itself_keeps_the_whole_line(report_of_line):
    verdict = report_of_line(LONG, columns_in(LONG)).verdict
    assert any(reason.startswith(f"`{LONG}`, train.py:12") for reason in verdict.evidence)
    assert verdict.operation.code[slice(*verdict.operation.columns)] == PART


@pytest.mark.parametrize("text", TEXTS)
def test_a_short_line_and_one_without_columns_are_whole(report_of_line, text):
    for code, columns in ((LONG, None), ("y = x @ w", (4, 9))):
        shown = re.sub(r"\s+", " ", text(report_of_line(code, columns), width=80))
        assert f"`{code}`, train.py:12" in shown


def test_an_operation_of_more_than_a_line_is_whole_in_three(report_of_line):
    part = " @ ".join(f"layer_{n}(x)" for n in range(14))
    assert 160 < len(part) < 200
    code = f"{'a = b; ' * 20}y = {part}; {'c = d; ' * 20}"
    report = report_of_line(code, columns_in(code, part))
    shown = re.sub(r"\s+", " ", screen_text(report, width=80))
    assert f"`...{part}...`, train.py:12" in shown
    longer = f"y = {part * 3}"
    report = report_of_line(longer, (4, len(longer)))
    assert len(evidence_lines(report.verdict, 80)[1].partition(", train.py")[0]) <= 3 * 80


def test_only_the_line_itself_is_cut(report_of_line):
    """A sentence of other origin that has the same code keeps it."""
    verdict = report_of_line(LONG, columns_in(LONG)).verdict
    more = [f"tried: `{LONG}`", f"`{LONG}` is what it says"]
    verdict = msgspec.structs.replace(verdict, evidence=[*verdict.evidence, *more])
    lines = evidence_lines(verdict, 80)
    assert lines[-2:] == more
    assert len(lines) == len(verdict.evidence)


LINES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=200)


@st.composite
def lines_with_columns(draw):
    code = draw(LINES)
    first = draw(st.integers(0, len(code)))
    return code, first, draw(st.integers(first, len(code)))


@given(lines_with_columns(), st.integers(1, 120))
@example(("x" * 60, 55, 60), 50)
@example(("x" * 60, 4, 53), 50)
@example(("x" * 60, 4, 54), 50)
@example(("x" * 60, 4, 59), 50)
def test_a_cut_keeps_the_operation_and_says_what_it_leaves_out(drawn, width):
    code, first, end = drawn
    line = cut_line(code, (first, end), width)
    before, part, behind = line.parts
    assert before + part + behind == line.text
    kept = min(end - first, width)
    assert part[:kept] == code[first : first + kept]
    assert part == code[first:end] or len(part) >= width
    if len(code) <= width:
        assert line == (code, first, end)
    assert len(line.text) <= min(len(code), max(width, kept + 6, 7))
    cut_left = before != code[:first]
    cut_right = behind != code[end:]
    left = before.removeprefix("...") if cut_left else before
    right = behind.removesuffix("...") if cut_right else behind
    assert before == ("..." if cut_left else "") + left and code[:first].endswith(left)
    assert behind == right + ("..." if cut_right else "")
    assert code[first + len(part) :].startswith(right)


@given(LINES, st.integers(), st.integers(), st.integers(-5, 120))
def test_any_columns_of_a_report_that_was_damaged_are_read(code, first, end, width):
    line = cut_line(code, (first, end), width)
    assert "".join(line.parts) == line.text
    assert 0 <= line.first <= line.end <= len(line.text)


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(marked_line).failed == 0
