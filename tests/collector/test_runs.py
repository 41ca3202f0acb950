"""`gpuwatch runs` and `gpuwatch report --module`: the commands as a user types them."""

from __future__ import annotations

import json
import os
import shlex
import time
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner
from gpuwatch.cli.live import folded
from gpuwatch.cli.main import cli
from gpuwatch.collector.finish import open_store, report_from_store, write_report
from gpuwatch.collector.run_files import RunPaths
from gpuwatch.core.text import command_for
from gpuwatch.core.wire.messages import AgentMessage, encode
from gpuwatch.core.wire.view import FILE, ViewerKeys


def overflow(make):
    batch = make.Batch(0)
    x, h, y = batch.tensor(), batch.tensor(2.0), batch.tensor(make.INF)
    batch.call("fc1", "Linear", given=[x], returned=[h], weights={"weight": batch.tensor()})
    batch.call("fc2", "Linear", given=[h], returned=[y])
    return [make.hello(nproc=1), *batch.messages(), make.ended(0, 1)]


@pytest.fixture
def runs(make, tmp_path):
    """Three runs: one overflowed, one is clean, one has no report yet."""
    folder = tmp_path / "my runs"
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


def typed(command: str) -> str:
    """What a command prints that was itself printed."""
    program, *words = shlex.split(command)
    assert program == "gpuwatch"
    return shown(*words)


def test_every_run_has_a_line_with_its_verdict(runs):
    lines = shown("runs", "--runs-dir", runs).splitlines()
    assert len(lines) == 3
    by_name = {line.split()[0]: line for line in lines}
    assert "overflow     Rank 0 on h0 overflowed first: +inf in the output of `fc2`" in by_name["first"]
    assert "clean " in by_name["second"] and "1 rank " in by_name["second"]
    assert by_name["third"].endswith(f"no report: gpuwatch report --again '{runs / 'third'}'")
    typed(by_name["third"].partition(": ")[2])
    assert "no report" not in shown("runs", "--runs-dir", runs)


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, ["one  2 ranks  overflow  Rank 1 on gpu-2 overflowed first: nan in `a.b`."]),
        (80, ["one  2 ranks  overflow  Rank 1 on gpu-2 overflowed first: nan in `a.b`."]),
        (60, ["one  2 ranks  overflow  Rank 1 on gpu-2 overflowed first:", "                        nan in `a.b`."]),
        (40, ["one  2 ranks  overflow", "    Rank 1 on gpu-2 overflowed first:", "    nan in `a.b`."]),
    ],
)
def test_a_statement_that_is_wider_than_the_terminal_is_folded_and_not_cut(width, lines):
    statement = "Rank 1 on gpu-2 overflowed first: nan in `a.b`."
    assert folded("one  2 ranks  overflow", statement, width).splitlines() == lines


def test_a_run_that_its_collector_still_shows_has_not_ended(runs):
    keys = {field.name: "" for field in msgspec.structs.fields(ViewerKeys) if field.required}
    (runs / "third" / FILE).write_bytes(msgspec.json.encode(keys))
    assert f"third   not ended: gpuwatch top '{runs / 'third'}'\n" in shown("runs", "--runs-dir", runs)


def test_the_report_of_a_run_that_has_not_ended_says_so_and_what_is_known_so_far(make, runs):
    batch = make.Batch(0)
    batch.call("fc1", "Linear", given=[batch.tensor()], returned=[batch.tensor()])
    running = [make.hello(nproc=1), *batch.messages(), make.NodeBeat([make.state(0, batch=4)], {})]
    paths = RunPaths(runs / "third")
    store = open_store(paths, 21)
    for n, body in enumerate(running, 1):
        store.add("a0", AgentMessage(n, body, n - 1), encode(AgentMessage(n, body, n - 1)))
    store.close()
    text = shown("report", paths.folder)
    assert "VERDICT  unknown: still running, or its collector died [GW108]" in text
    assert "\nNo overflow seen so far: 1 rank, 5 batches.\n" in text
    assert "rank 0 has not ended: last heard from in batch 4 [GW502]" in text
    page = shown("report", paths.folder, "--format", "html")
    assert "<strong>unknown</strong> <span>still running, or its collector died</span>" in page


def test_top_draws_no_screen_where_its_output_is_no_terminal(runs, monkeypatch):
    """A key ends it, and a pipe has none."""
    silent = SimpleNamespace(is_shown=True, newest=lambda timeout_s: None, close=lambda: None)
    monkeypatch.setattr("gpuwatch.collector.views.publisher.job_viewer", lambda path: silent)
    monkeypatch.setattr("gpuwatch.cli.live._watch", lambda link, path: pytest.fail("it draws a screen"))
    done = CliRunner().invoke(cli, ["top", str(runs / "first")])
    assert "the collector of first has sent nothing" in str(done.exception)


def test_a_report_with_frames_of_the_root_alone_says_so_to_a_pattern_that_fits_none(make, tmp_path):
    batch = make.Batch(0)
    batch.call("", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)])
    store = open_store(RunPaths(tmp_path), 21)
    for n, body in enumerate([make.hello(nproc=1), *batch.messages(), make.ended(0, 1)], 1):
        store.add("a0", AgentMessage(n, body, n - 1), encode(AgentMessage(n, body, n - 1)))
    store.close()
    done = CliRunner().invoke(cli, ["report", str(tmp_path), "--module", "head.*"])
    assert "found 'head.*' (they are of the root module alone)" in str(done.exception)


@pytest.mark.parametrize(("command", "word"), [("report", "report"), ("top --once", "top"), ("export", "export")])
def test_a_folder_of_runs_is_answered_with_its_newest_and_the_command(runs, command, word, monkeypatch):
    monkeypatch.chdir(runs)
    for folder in (str(runs), "."):
        error = CliRunner().invoke(cli, [*command.split(), folder]).exception
        newest = f"gpuwatch {word} '{runs / 'third'}'"
        assert f"found {folder!r}, a folder of runs; its newest one: {newest} [GW" in str(error)
        assert error.exit_code == 2
    refused = CliRunner().invoke(cli, ["runs", "--like", str(runs)]).exception
    assert f"its newest one: gpuwatch report '{runs / 'third'}' [GW" in str(refused)
    if word == "report":
        assert "run third" in typed(newest)


def test_a_run_whose_store_was_read_is_no_newer(runs):
    for second, name in enumerate(["second", "first", "third"]):
        (runs / name / "logs").mkdir()
        os.utime(runs / name / "logs", (second, second))
    shown("export", runs / "second")
    (runs / "second" / "run.sqlite-wal").touch()
    lines = shown("runs", "--runs-dir", runs).splitlines()
    assert [line.split()[0] for line in lines] == ["second", "first", "third"]


def test_a_pipe_gets_whole_lines(runs):
    done = CliRunner().invoke(cli, ["runs", "--runs-dir", str(runs)], env={**os.environ, "COLUMNS": "80"})
    assert "first: +inf in the output of `fc2` (Linear), forward, batch 0.\n" in done.output


def test_the_last_ones_are_shown_and_the_others_counted(runs):
    lines = shown("runs", "--runs-dir", runs, "--last", 1).splitlines()
    assert len(lines) == 2 and lines[1] == "2 older runs not shown: --last N"


def test_as_json(runs):
    found = {run["id"]: run for run in json.loads(shown("runs", "--runs-dir", runs, "--format", "json"))}
    assert found["first"]["verdict"]["kind"] == "overflow"
    assert found["third"] == {"id": "third", "run": None, "verdict": None}


def test_a_report_that_is_damaged_is_none(runs):
    (runs / "first" / "report.json").write_bytes(b'{"schema": 1')
    listed = shown("runs", "--runs-dir", runs)
    assert "overflow     Rank 0 on h0 overflowed first" in listed, "verdict.json has it"
    assert listed.count("no report") == 1
    (runs / "first" / "verdict.json").unlink()
    assert shown("runs", "--runs-dir", runs).count("no report: gpuwatch report --again ") == 2


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


@pytest.mark.parametrize("command", ["runs", "report", "top", "diff"])
def test_a_file_in_place_of_the_runs_folder_is_refused(tmp_path, command):
    (tmp_path / "a.py").touch()
    done = CliRunner().invoke(cli, [command, "--runs-dir", str(tmp_path / "a.py")], standalone_mode=False)
    assert str(done.exception) == (
        f"--runs-dir: expected a folder with the folders of runs, found the file '{tmp_path / 'a.py'}' [GW403]"
    )


@pytest.mark.parametrize(
    ("run", "found"),
    [
        ("first/report.json", "expected a run, found 'first/report.json', a file of one; did you mean {first}?"),
        (
            "r.json",
            "or a .spool file, found the file 'r.json', which is none of them (",
        ),
        (
            "adir",
            "or a .spool file, found the folder 'adir', which is none of them (",
        ),
        ("frist", "found none at 'frist'; did you mean first? (runs there, newest last: first, second, third; "),
        ("nope", "found none at 'nope' (runs there, newest last: "),
    ],
)
def test_what_is_no_run_is_told_by_what_it_is(runs, monkeypatch, run, found):
    monkeypatch.chdir(runs)
    (runs / "r.json").write_text("{}")
    (runs / "adir").mkdir()
    done = CliRunner().invoke(cli, ["report", run, "--runs-dir", "."], standalone_mode=False)
    assert found.format(first=command_for(runs / "first")) in str(done.exception)
    assert done.exception.exit_code == 2
