"""What a user sees of a report of each kind, letter by letter: the whole text, one screen of it, and the page
with scripts off.

A change that is meant is written with: WRITE_GOLDEN=1 python -m pytest tests/collector/report/html/test_golden.py
Then read the difference before it is committed.
"""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from gpuwatch.collector.report.html.page import render_html
from gpuwatch.collector.report.one_screen import screen_text
from gpuwatch.collector.report.text_report import render_text

from .conftest import KINDS

FOLDER = Path(__file__).parent / "golden"
CASES = [
    (kind, rendering)
    for kind in KINDS
    for rendering in ("text", "screen", "page")
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


SAID = {
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


def test_there_is_a_golden_file_for_each_and_no_other():
    assert {path.name for path in FOLDER.iterdir()} == {f"{kind}.{rendering}.txt" for kind, rendering in CASES}
