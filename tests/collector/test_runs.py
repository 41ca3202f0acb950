"""`gpuwatch runs` and `gpuwatch report --module`: the commands as a user types them."""

from __future__ import annotations

import json
import os
import time

import pytest
from click.testing import CliRunner
from gpuwatch.cli.main import cli
from gpuwatch.collector.finish import open_store, report_from_store, write_report
from gpuwatch.collector.run_files import RunPaths
from gpuwatch.core.wire.messages import AgentMessage, encode


def overflow(make):
    batch = make.Batch(0)
    x, h, y = batch.tensor(), batch.tensor(2.0), batch.tensor(make.INF)
    batch.call("fc1", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor()})
    batch.call("fc2", "Linear", given=[h], returned=[y])
    return [make.hello(nproc=1), *batch.messages(), make.ended(0, 1)]


@pytest.fixture
def runs(make, tmp_path):
    """Three runs: one overflowed, one is clean, one has no report yet."""
    folder = tmp_path / "runs"
    batch = make.Batch(0)
    batch.call("fc1", "Linear", given=[batch.tensor()], returned=[batch.tensor()])
    clean = [make.hello(nproc=1), *batch.messages(), *make.finished(0), make.NodeBye("ok")]
    for name, bodies in (("first", overflow(make)), ("second", clean), ("third", None)):
        paths = RunPaths(folder / name)
        paths.folder.mkdir(parents=True)
        store = open_store(paths, 21)
        for n, body in enumerate(bodies or [], 1):
            message = AgentMessage(n, body, n - 1)
            store.add("a0", message, encode(message))
        store.close()
        if bodies:
            assert write_report(paths, report_from_store(paths)) is None
    (folder / "latest").symlink_to("third")
    (folder / "something else").mkdir()
    return folder


def shown(*arguments) -> str:
    done = CliRunner().invoke(cli, list(map(str, arguments)), env={**os.environ, "COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_every_run_has_a_line_with_its_verdict(runs):
    lines = shown("runs", "--runs-dir", runs).splitlines()
    assert len(lines) == 3
    by_name = {line.split()[0]: line for line in lines}
    assert "overflow     Rank 0 on h0 overflowed first: +inf in the output of `fc2`" in by_name["first"]
    assert "clean " in by_name["second"] and "1 rank " in by_name["second"]
    assert by_name["third"].endswith("no report")


def test_the_last_ones_are_shown_and_the_others_counted(runs):
    lines = shown("runs", "--runs-dir", runs, "--last", 1).splitlines()
    assert len(lines) == 2 and lines[1] == "2 older runs not shown: --last N"


def test_as_json(runs):
    found = {run["id"]: run for run in json.loads(shown("runs", "--runs-dir", runs, "--format", "json"))}
    assert found["first"]["verdict"]["kind"] == "overflow"
    assert found["third"] == {"id": "third", "run": None, "verdict": None}


def test_a_report_that_is_damaged_is_none(runs):
    (runs / "first" / "report.json").write_bytes(b'{"schema": 1')
    assert sum(line.endswith("no report") for line in shown("runs", "--runs-dir", runs).splitlines()) == 2


def test_a_statement_with_control_characters_stays_a_line(runs):
    path = runs / "first" / "report.json"
    report = json.loads(path.read_text())
    report["verdict"]["statement"] = "\x1b[2J\nVERDICT clean"
    path.write_text(json.dumps(report))
    text = shown("runs", "--runs-dir", runs)
    assert "\x1b" not in text and len(text.splitlines()) == 3


def test_an_unknown_run_is_answered_with_the_newest_ones_in_the_order_of_the_list(runs):
    names, then = ["f", "e", "d", "c", "b", "a"], time.time_ns()
    for folder in (runs / name for name in names):
        folder.mkdir()
        (folder / "run.sqlite").touch()
        while folder.stat().st_ctime_ns <= then:  # the kernel's clock ticks
            os.utime(folder)
        then = folder.stat().st_ctime_ns
    done = CliRunner().invoke(cli, ["report", "nowhere", "--runs-dir", str(runs)])
    listed = [line.split()[0] for line in shown("runs", "--runs-dir", runs, "--last", 5).splitlines()[:5]]
    assert listed == names[1:]
    assert f"(runs there, newest last: {', '.join(listed)}; elsewhere: --runs-dir DIR)" in str(done.exception)


def test_a_folder_without_runs(tmp_path):
    assert "there is no run in" in shown("runs", "--runs-dir", tmp_path)


def test_only_the_frames_of_some_modules(runs):
    text = shown("report", runs / "first", "--module", "fc2*")
    assert "fc2 Linear" in text and "fc1 Linear" not in text
    report = json.loads(shown("report", runs / "first", "--module", "*1", "--format", "json"))
    assert [frame["module"] for frame in report["ranks"][0]["frames"]] == ["fc1"]


def test_a_pattern_that_fits_no_module_is_wrong_usage(runs):
    done = CliRunner().invoke(cli, ["report", str(runs / "first"), "--module", "attn*"])
    assert type(done.exception).__name__ == "UsageError"
    assert "found 'attn*' (modules there: fc1, fc2)" in str(done.exception)
