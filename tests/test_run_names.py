"""How a user names a run: also by a job's number, and where the folder has none, the last one that was launched."""

from __future__ import annotations

import lzma
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from gpuwatch.cli.main import cli
from gpuwatch.collector.finish import open_store, report_from_store, write_report
from gpuwatch.collector.run_files import new_run
from gpuwatch.core.errors import UsageError
from gpuwatch.core.wire.view import ViewerKeys
from gpuwatch.launcher.last_run import remember_run, remembered_run

STORE = Path(__file__).parent / "data" / "runs" / "leaf.sqlite.xz"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """name -> the folder of that run, somewhere else than here."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def make(name: str, runs_dir: Path | None = None) -> Path:
        paths = new_run(runs_dir or tmp_path / "elsewhere" / "gpuwatch-runs", name)
        open_store(paths, 21).close()
        assert write_report(paths, report_from_store(paths)) is None
        return paths.folder

    return make


def shown(*words: str):
    return CliRunner().invoke(cli, ["report", *words])


def remember(folder: Path) -> None:
    """Until it is written, or could not be."""
    remember_run(folder)
    for thread in threading.enumerate():
        if thread.name == "gpuwatch-last-run":
            thread.join()


def test_a_folder_without_runs_has_that_of_the_last_launch(run):
    folder = run("first")
    assert isinstance(shown().exception, UsageError), "nothing was launched"
    remember(folder)
    done = shown()
    assert "gpuwatch report: run first" in done.output
    assert done.output.startswith(
        f"gpuwatch: gpuwatch-runs here has no such run; this is {folder}, of your last launch"
    )
    here = run("own", Path("gpuwatch-runs"))
    assert "gpuwatch report: run own" in shown().output and not shown().output.startswith("gpuwatch: gpuwatch-runs")
    assert here.is_dir()


@pytest.fixture
def with_a_batch(run):
    """The folder of a run elsewhere, with batches in its store."""
    folder = run("first")
    (folder / "run.sqlite").write_bytes(lzma.decompress(STORE.read_bytes()))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        *("stacks", "stacks latest", "stacks first", "top --once", "top --once first", "export", "export first"),
        *("diff latest --rank 0,1", "diff first first", "replay", "replay first", "runs", "runs --like first"),
    ],
)
def test_every_command_finds_the_last_launch(words, with_a_batch):
    command, *rest = words.split()
    before = CliRunner().invoke(cli, [command, *rest])
    assert isinstance(before.exception, UsageError) or "there is no run in gpuwatch-runs" in before.output
    remember(with_a_batch)
    done = CliRunner().invoke(cli, [command, *rest])
    said = done.output.splitlines()[0]
    assert said.startswith("gpuwatch: gpuwatch-runs here has no ") and said.endswith(", of your last launch")
    assert str(with_a_batch if words != "runs" else with_a_batch.parent) in said
    named = CliRunner().invoke(cli, [command, "--runs-dir", "gpuwatch-runs", *rest])
    assert named.output == before.output and str(named.exception) == str(before.exception)


def test_submit_leaves_out_the_nodes_of_the_last_launch_too(run):
    folder = run("first")
    Path("train.py").touch()
    words = ["submit", "--print", "--exclude-bad", "latest", "train.py"]
    assert isinstance(CliRunner().invoke(cli, words).exception, UsageError)
    remember(folder)
    done = CliRunner().invoke(cli, words)
    assert f"this is {folder}, of your last launch" in done.output
    assert "the verdict of first blames no node" in done.output
    elsewhere = CliRunner().invoke(cli, [words[0], "--runs-dir", "gpuwatch-runs", *words[1:]])
    assert isinstance(elsewhere.exception, UsageError), "a folder that was named is the only one"


def test_tab_offers_the_runs_beside_the_last_launch(run):
    def offered(*words: str) -> list[str]:
        complete = ShellComplete(cli, {}, "gpuwatch", "_GPUWATCH_COMPLETE").get_completions(["report", *words], "")
        return [item.value for item in complete]

    run("first")
    assert offered() == []
    remember(run("second"))
    assert offered() == ["second", "first"]
    assert offered("--runs-dir", "elsewhere") == []
    run("own", Path("gpuwatch-runs"))
    assert offered() == ["own"]


def test_the_runs_are_those_beside_the_last_launch(run):
    run("first")
    remember(run("second"))
    done = CliRunner().invoke(cli, ["runs"])
    assert [line.split()[0] for line in done.output.splitlines()[1:]] == ["first", "second"]
    run("own", Path("gpuwatch-runs"))
    assert CliRunner().invoke(cli, ["runs"]).output.startswith("own ")


def test_a_run_that_has_ended_is_not_called_one_without_a_collector(run):
    folder = run("first", Path("gpuwatch-runs")).absolute()
    for words in (["stacks"], ["top", "--once"]):
        error = CliRunner().invoke(cli, words).exception
        assert f"found first, which has ended; its report: gpuwatch report {folder}" in str(error)
    running = run("second", Path("gpuwatch-runs")).absolute()
    (running / "view.json").write_bytes(msgspec.json.encode(ViewerKeys("tcp://127.0.0.1:1", "", "", "")))
    (Path("gpuwatch-runs") / "latest").unlink()
    (Path("gpuwatch-runs") / "latest").symlink_to("first")
    error = CliRunner().invoke(cli, ["stacks"]).exception
    assert f"; second has not ended: gpuwatch stacks {running}" in str(error)
    (folder / "verdict.json").unlink()
    assert "found no collector that shows first" in str(CliRunner().invoke(cli, ["stacks"]).exception)


def test_a_folder_that_was_named_is_the_only_one(run):
    remember(run("first"))
    assert isinstance(shown("--runs-dir", "nowhere").exception, UsageError)
    assert isinstance(shown("second").exception, UsageError)
    done = shown("first")
    assert "gpuwatch report: run first" in done.output and "of your last launch" in done.output, "a name beside it"
    here = run("first", Path("gpuwatch-runs"))
    assert here.is_dir() and "of your last launch" not in shown("first").output


def test_a_run_that_is_gone_is_not_shown(run, tmp_path):
    remember(tmp_path / "gone")
    assert isinstance(shown().exception, UsageError)


def test_a_job_is_named_by_its_number(run):
    here = Path("gpuwatch-runs")
    for name in ("20261121-091533-slurm-17", "20261121-092101-slurm-17-restart-1", "20261121-091533-slurm-170"):
        run(name, here)
    assert "run 20261121-092101-slurm-17-restart-1," in shown("17").output, "its last life"
    assert "run 20261121-091533-slurm-170," in shown("170").output
    assert isinstance(shown("1").exception, UsageError)
    run("20261121-091533-slurm-18_3")
    last = run("20261121-101533-slurm-19")
    remember(last)
    done = shown("18_3")
    assert "run 20261121-091533-slurm-18_3," in done.output and "of your last launch" in done.output


def test_the_file_is_this_users_alone_and_holds_a_path(own_state_folder, tmp_path):
    folder = tmp_path / "a b\udcff"
    remember(folder)
    file = own_state_folder / "gpuwatch" / "last-run"
    assert file.read_bytes() == os.fsencode(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert remembered_run() == folder


@pytest.mark.parametrize("state", ["/proc/no-such-folder", "relative", ""])
def test_what_cannot_be_written_or_read_is_no_error(state, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("XDG_STATE_HOME", state)
    monkeypatch.setenv("HOME", "/proc/no-such-home")
    remember(tmp_path)
    assert remembered_run() is None
    assert capfd.readouterr() == ("", "")
