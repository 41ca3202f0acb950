"""What a user sees of a report of each kind, letter by letter: the whole text, one screen of it, and the page
with scripts off.

A change that is meant is written with: WRITE_GOLDEN=1 python -m pytest tests/collector/report/html/test_golden.py
Then read the difference before it is committed.
"""

from __future__ import annotations

import lzma
import os
import re
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.html.page import render_html
from gpuwatch.collector.report.one_screen import screen_text
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.collector.store import RunStore

from .conftest import KINDS

FOLDER = Path(__file__).parent / "golden"
RUNS = Path(__file__).parents[3] / "data" / "runs"
CASES = [
    (kind, rendering)
    for kind in KINDS
    for rendering in ("text", "screen", "page", "80x24", "120x50")
    if (kind, rendering) != ("thousand", "page")
]
LAST_WORDS = "report: /home/me/gpuwatch-runs/latest/report.json\nas a page: /home/me/gpuwatch-runs/latest/report.html"
_NOT_READ = {"style", "script"}
_BLOCKS = {"p", "h1", "h2", "h3", "li", "tr", "section", "details", "summary", "div", "pre", "figure", "figcaption"}


class Reader(HTMLParser):
    """The page as a reader meets it: its text, a line for each block, a bar between the cells of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self._inside: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag in _NOT_READ:
            self._inside.append(tag)
        self.said.append("\n" if tag in _BLOCKS else " | " if tag in ("td", "th") else " ")

    def handle_endtag(self, tag):
        if tag in _NOT_READ:
            self._inside.pop()
        self.said.append("\n" if tag in _BLOCKS else " ")

    def handle_data(self, data):
        if not self._inside:
            self.said.append(data)


def text_of(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    lines = [re.sub(r"[ \t]+", " ", line).strip() for line in "".join(reader.said).splitlines()]
    return "\n".join(line for line in lines if line)


def terminal(report, columns, lines):
    """What stands on a terminal of this size once the job has ended, with a prompt below it."""
    rows = []
    for line in [*screen_text(report, width=columns, last_words=LAST_WORDS).splitlines(), "$"]:
        rows += [line[at : at + columns] for at in range(0, len(line), columns)] or [""]
    return "\n".join(rows[-lines:])


SAID = {
    "80x24": lambda report: terminal(report, 80, 24),
    "120x50": lambda report: terminal(report, 120, 50),
    "text": lambda report: render_text(report, width=110),
    "screen": lambda report: screen_text(report, last_words=LAST_WORDS),
    "page": lambda report: text_of(render_html(report)),
}


@pytest.mark.parametrize(("kind", "rendering"), CASES)
def test_a_report_is_what_it_was(report_of, kind, rendering):
    report = report_of(kind)
    said = SAID[rendering](report)
    golden = FOLDER / f"{kind}.{rendering}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        golden.write_text(said + "\n")
    assert said + "\n" == golden.read_text()


def is_all_there(report, screen):
    """Whether a terminal has the headline, the beginning of the cause, and that of the next step."""
    shown, verdict = " ".join(screen.split()), report.verdict
    parts = [f"VERDICT {verdict.kind}, {report.how_sure}", verdict.statement, *verdict.next[:1]]
    parts += [f"Cause, {verdict.cause.certainty}: {verdict.cause.statement}"] if verdict.cause is not None else []
    return all(" ".join(part.split()[:12]) in shown for part in parts)


@pytest.mark.parametrize("size", ["80x24", "120x50"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_terminal_has_the_headline_and_the_next_step(report_of, kind, size):
    assert is_all_there(report_of(kind), SAID[size](report_of(kind)))


def test_on_a_small_terminal_that_takes_the_answer_once_more(report_of):
    once = screen_text(report_of("forward"), last_words=LAST_WORDS, again=False)
    assert not is_all_there(report_of("forward"), "\n".join(once.splitlines()[-24:]))


@pytest.mark.quick(4)
@pytest.mark.parametrize("store", sorted(RUNS.glob("*.sqlite.xz")), ids=lambda path: path.name.partition(".")[0])
def test_a_terminal_has_them_and_the_cause_after_a_real_run(store, tmp_path):
    (tmp_path / "run.sqlite").write_bytes(lzma.decompress(store.read_bytes()))
    with closing(RunStore(tmp_path / "run.sqlite")) as opened:
        report = build_report(fold(opened.messages()), run_id="x", started=None, ended=None)
    assert [size for size in ("80x24", "120x50") if not is_all_there(report, SAID[size](report))] == []


def test_there_is_a_golden_file_for_each_and_no_other():
    assert {path.name for path in FOLDER.iterdir()} == {f"{kind}.{rendering}.txt" for kind, rendering in CASES}
