"""report.html as text: whole, small, and nothing in it but text where a script chose the words."""

from __future__ import annotations

import doctest
import html
import re
from contextlib import suppress
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from gpuwatch.cli.main import cli
from gpuwatch.collector.finish import open_store, report_from_store, write_page, write_report
from gpuwatch.collector.report.html import chart, page
from gpuwatch.collector.report.html.grids import rank_grid
from gpuwatch.collector.run_files import RunPaths
from gpuwatch.core.wire.messages import AgentMessage, encode
from msgspec.structs import replace

from .conftest import HOSTILE, KINDS, messages_of

VOID = {"meta", "link", "input", "option", "br"}


class Outline(HTMLParser):
    """Reads a page strictly: what is opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.addresses, self.text = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def outline(text: str) -> Outline:
    parser = Outline()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_whole_and_needs_nothing_beside_it(page_of, report_of, kind):
    found = outline(page_of(kind))
    assert all(address.startswith(("#", "data:,")) for address in found.addresses)
    assert found.tags.count("script") == 1
    verdict = report_of(kind).verdict
    assert verdict.statement.replace("`", "") in found.text
    lines = "\n".join([*verdict.evidence, *verdict.next]).replace("`", "").splitlines()
    assert all(line.strip() in found.text for line in lines)


def test_it_is_small(page_of):
    assert len(page_of("forward").encode()) < 2_000_000
    assert len(page_of("thousand").encode()) < 6_000_000


def test_what_a_script_chose_is_text(page_of):
    text = page_of("hostile")
    assert HOSTILE not in text
    assert HOSTILE in outline(text).text


def test_only_our_script_may_run(page_of):
    """The policy names it by its digest, and forbids everything else."""
    text = page_of("clean")
    script = re.search(r"<script>(.*?)</script>", text, re.S).group(1)
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', text).group(1))
    assert f"script-src 'sha256-{page._digest(script)}'" in policy
    assert policy.startswith("default-src 'none'")


def test_the_named_rank_stands_beside_a_healthy_one(page_of):
    assert "Last frames of rank 1 beside rank 0" in page_of("forward")


@pytest.mark.parametrize("kind", ["forward", "hang", "preflight"])
def test_each_code_is_a_link_to_its_text_on_the_page(page_of, report_of, kind):
    page = page_of(kind)
    linked = set(re.findall(r'href="#(gw\d+)">\[GW\d+\]</a>', page))
    assert report_of(kind).verdict.code.lower() in linked
    assert linked == set(re.findall(r'<dt id="(gw\d+)">', page))


GRAPH = "/env/lib/python3.11/site-packages/torch/autograd/graph.py"


@pytest.mark.parametrize(
    ("stack", "word"),
    [
        ("/home/me/train.py:41 in <module>: time.sleep(9)", "train.py:41"),
        ("/lib/torch/distributed/distributed_c10d.py:3007 in all_reduce: work.wait()", "all_reduce"),
        ("memcpy of libc.so.6, native", "memcpy"),
        ("thread python, which a signal has stopped", "stopped"),
        (f"{GRAPH}:865 in _engine_run_backward: return run_backward()|{GRAPH}:9 in backward: run()", "backward"),
        (f"{GRAPH}:865 in _engine_run_backward: return run_backward()", "_engine_run"),
        ("/home/me/train.py:41 in _wait: time.sleep(9)|/home/me/train.py:60 in main: _wait()", "_wait"),
        ("", "no stack"),
    ],
)
def test_a_square_of_a_hang_says_where_its_rank_is(report_of, stack, word):
    report = report_of("hang")
    ranks = [replace(rank, stack=stack.split("|") if stack and rank.rank == 1 else []) for rank in report.ranks]
    ranks[0] = replace(ranks[0], stack=["/home/me/train.py:60 in main: wait()"])
    squares = rank_grid(replace(report, ranks=ranks)).squares
    assert squares[1][-1] == word


def test_frames_that_there_is_no_room_for_are_counted(report_of, monkeypatch):
    monkeypatch.setattr(page, "FRAMES_BYTES", 100)
    assert "2 more in report.json" in page.render_html(report_of("forward"))


def test_the_examples_in_the_docstrings_hold():
    assert all(doctest.testmod(module).failed == 0 for module in (chart, page))


@pytest.fixture
def run(make, tmp_path) -> RunPaths:
    folder = tmp_path / "runs" / "20261122-000000-aaaa"
    folder.mkdir(parents=True)
    paths = RunPaths(folder)
    store = open_store(paths, 21)
    for agent, n, body in messages_of(make, "forward"):
        message = AgentMessage(n, body, n - 1)
        store.add(agent, message, encode(message))
    store.close()
    return paths


def test_a_page_that_cannot_be_made_costs_nothing_else(run, monkeypatch):
    report = report_from_store(run)
    monkeypatch.setattr("gpuwatch.collector.report.html.page.picture_of", lambda report: 1 / 0)
    assert write_report(run, report) is None
    trouble = write_page(run, report)
    assert "report.html could not be made: ZeroDivisionError" in trouble
    assert run.report_json.exists() and run.report_text.exists() and not run.report_html.exists()


def test_a_full_disk_is_said_and_nothing_half_written_is_left(run, small_disk):
    report, full, ballast = report_from_store(run), RunPaths(small_disk), small_disk / "ballast"
    with suppress(OSError):
        ballast.write_bytes(bytes(1 << 20))
    assert "No space left on device" in write_report(full, report)
    assert "No space left on device" in write_page(full, report)
    assert list(small_disk.iterdir()) == [ballast]


def shown(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["report", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_the_command_makes_the_page(run, tmp_path):
    assert shown(str(run.folder), "--format", "html").startswith("<!doctype html>")
    wanted = tmp_path / "mail me.html"
    assert shown(str(run.folder), "--format", "html", "-o", str(wanted)) == ""
    assert outline(wanted.read_text(encoding="utf-8")).tags
    shown(str(run.folder), "--again")
    assert run.report_html.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_command_opens_the_page_with_the_rank_in_the_link(run, monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    shown(str(run.folder), "--open", "--rank", "0", "-o", str(tmp_path / "page.html"))
    assert opened == [(tmp_path / "page.html").as_uri() + "#rank=0"]


def test_without_a_browser_the_command_says_where_the_page_is(run, monkeypatch, tmp_path):
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    wanted = tmp_path / "page.html"
    assert f"the page is {wanted}" in shown(str(run.folder), "--open", "-o", str(wanted))


def test_a_file_that_cannot_be_written_is_wrong_usage(run, tmp_path):
    done = CliRunner().invoke(cli, ["report", str(run.folder), "-o", str(tmp_path / "no" / "such.txt")])
    assert type(done.exception).__name__ == "UsageError"
    assert "--output: expected a file that can be written" in str(done.exception)
