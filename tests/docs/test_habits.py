"""What a contributor meets on the way in: the form of a bug report, and the hook that pre-commit runs."""

from __future__ import annotations

import json
import lzma
import re
import shlex
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.model import to_json
from gpuwatch.collector.store import RunStore

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^]]*\]\(([^)\s#]+)[^)]*\)")


def test_the_line_of_the_form_leaves_the_numbers_of_a_report_out(tmp_path):
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text())
    fields = {field["id"]: field["attributes"]["description"] for field in form["body"] if "id" in field}
    assert set(fields) == {"what", "command", "control", "versions", "report"}
    (line,) = re.findall(r"^    (gpuwatch .*)$", fields["report"], flags=re.M)
    shown, _, code = line.partition(" | ")
    assert shlex.split(shown) == ["gpuwatch", "report", "--format", "json"]
    python, *rest = shlex.split(code)
    assert python == "python"

    store = tmp_path / "run.sqlite"
    store.write_bytes(lzma.decompress((ROOT / "tests" / "data" / "runs" / "leaf.sqlite.xz").read_bytes()))
    with closing(RunStore(store)) as opened:
        report = to_json(build_report(fold(opened.messages()), run_id="x", started=None, ended=None))
    done = subprocess.run([sys.executable, *rest], input=report, capture_output=True, check=True)
    before, after = json.loads(report), json.loads(done.stdout)
    assert before["ranks"][0]["frames"] and before["run"]["command"]
    assert all("frames" not in rank for rank in after["ranks"]) and "command" not in after["run"]
    assert after["verdict"] == before["verdict"]


def test_the_hook_is_what_make_lint_runs():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repo["hooks"]
    assert (repo["repo"], hook["entry"], hook["language"]) == ("local", "make lint", "system")


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_every_link_of_a_page_at_the_root_leads_to_a_file(page):
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_files_that_one_number_passes_are_there_and_as_many_as_the_page_says():
    page = (ROOT / "docs" / "development.md").read_text()
    said, table = re.search(r"passes (\d+) files.*?\n\n(\|.*?\|)\n\n", page, flags=re.S).groups()
    names = re.findall(r"`((?:\w+/)*\w+(?:\.\w+)+)`", table)
    assert len(names) == len(set(names)) == int(said)
    rooms = [ROOT / room for room in ("worker", "launcher", "core", "collector")]
    there = {path.name for room in rooms for path in room.rglob("*.*")}
    assert {Path(name).name for name in names} <= there
