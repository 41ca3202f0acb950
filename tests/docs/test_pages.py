"""README.md and docs/: links lead somewhere, options are those of the parsers, and what is shown can be typed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from gpuwatch.cli.explain_log import explain_log
from gpuwatch.cli.export import diff, export
from gpuwatch.cli.jobs import collect
from gpuwatch.cli.live import runs, stacks, top
from gpuwatch.cli.main import explain
from gpuwatch.cli.replay import replay
from gpuwatch.cli.report import report
from gpuwatch.cli.submit import arguments_of, options_of
from gpuwatch.collector.report.model import RankReport, RunInfo, RunReport
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.collector.views.frame_export import ExportRow
from gpuwatch.core.codes import ExitCode, VerdictKind
from gpuwatch.launcher.options import get_check_parser, get_parser, parse_run
from gpuwatch.slurm.submission import take_apart
from msgspec.structs import fields

from .walk import PAGES, blocks

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    lost = []
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_every_page_can_be_reached_from_the_readme():
    reached, open_ = set(), [ROOT / "README.md"]
    while open_:
        page = open_.pop()
        reached.add(page)
        links = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
        open_ += {(page.parent / link).resolve() for link in links if link.endswith(".md")} - reached
    assert set(PAGES) <= reached


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_reference_has_words_above_it(page):
    """In the repository the line of a reference shows nothing: only mkdocs fills it in."""
    lines = [line for line in page.read_text().splitlines() if line]
    above = [lines[at - 1] for at, line in enumerate(lines) if line.startswith("::: ")]
    assert [line for line in above if line.startswith((":::", "#", "|"))] == []


def test_the_readme_is_a_front_door():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_options_are_those_of_the_parsers():
    spec = importlib.util.spec_from_file_location("make_options", ROOT / "docs" / "make_options.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)

    assert maker.PAGE.read_text() == maker.page(), "run: python docs/make_options.py"


def test_every_column_of_an_export_is_told():
    page = (ROOT / "docs" / "export.md").read_text()
    told = re.findall(r"^\| `(\w+)` \| (\w+)", page, flags=re.M)
    kinds = {int: "integer", float: "number", str: "text"}
    named = [
        (field.encode_name, kinds[getattr(field.type, "__args__", (field.type,))[0]]) for field in fields(ExportRow)
    ]
    assert told == named


@pytest.mark.parametrize("struct", [Verdict, RankReport, RunReport, RunInfo], ids=lambda struct: struct.__name__)
def test_every_field_of_the_report_is_told(struct):
    page = (ROOT / "docs" / "report.md").read_text()
    missing = [field.encode_name for field in fields(struct) if not re.search(rf"\b{field.encode_name}\b", page)]
    assert missing == []


def test_every_kind_and_exit_code_is_told():
    page = (ROOT / "docs" / "report.md").read_text()
    assert {kind for kind in VerdictKind if f"| `{kind}` |" not in page} == set()
    codes = {int(code) for code in ExitCode if code is not ExitCode.SIGNAL}
    assert {code for code in codes if f"\n| {code} |" not in page} == set()


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for command in (command for block in blocks(page) for command in block.parts()[0]):
            if command.startswith("gpuwatch ") and page.name != "options.md":
                yield page.name, shlex.split(command.replace("$HEAD", "head"), comments=True)[1:]


COMMANDS = list(shown_commands())
PLAIN: dict[str, click.Command] = {
    "report": report,
    "replay": replay,
    "runs": runs,
    "diff": diff,
    "export": export,
    "collect": collect,
    "top": top,
    "stacks": stacks,
    "explain": explain,
    "explain-log": explain_log,
}
"""Those that click parses."""


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[shlex.join(words)[:60] for _, words in COMMANDS])
def test_every_command_that_is_shown_is_understood(page, words, monkeypatch):
    """Its options exist, and its values are of the right kind."""
    monkeypatch.chdir(ROOT)
    verb, arguments = words[0], [word for word in words[1:] if word not in (">", "gpuwatch.sbatch")]
    if verb == "launch":
        get_parser().parse_args(arguments or ["train.py"])
    elif verb == "run":
        parse_run(arguments)
    elif verb == "submit" or "--slurm" in arguments:
        parser = get_parser() if verb == "submit" else get_check_parser()
        submission = take_apart([word for word in arguments if word != "--slurm"], options_of(parser))
        if submission.script or verb == "check":  # else the template is printed
            parser.parse_args(arguments_of(submission))
    elif verb == "check":
        get_check_parser().parse_args(arguments)
    else:
        PLAIN[verb].make_context(verb, arguments)


def test_commands_were_found():
    verbs = {
        "launch",
        "run",
        "check",
        "report",
        "runs",
        "diff",
        "submit",
        "export",
        "collect",
        "top",
        "stacks",
        "replay",
        "explain",
        "explain-log",
    }
    assert {words[0] for _, words in COMMANDS} == verbs
