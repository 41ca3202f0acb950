from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
from gpuwatch.core.errors import UsageError
from gpuwatch.launcher.options import parse_check, parse_launch, parse_run
from gpuwatch.launcher.saved_settings import saved_runs_dir

from ..core.test_names import all_modules
from ..parsed import nodes_of


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith(("PET_", "GPUWATCH_"))]:
        monkeypatch.delenv(name)
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def save(text: str, name: str = "gpuwatch.toml") -> None:
    Path(name).write_text(text)


def test_without_a_file_nothing_is_saved():
    args = parse_launch(["train.py"])
    assert (args.every, args.notes) == (1, [])


def test_the_command_line_comes_before_the_variable_and_that_before_the_file(monkeypatch):
    save("every = 3\nmax-frames = 3\nscaler-skips = 3\n")
    monkeypatch.setenv("GPUWATCH_MAX_FRAMES", "4")
    monkeypatch.setenv("GPUWATCH_SCALER_SKIPS", "4")
    args = parse_launch(["--scaler-skips", "5", "train.py"])
    assert (args.every, args.max_frames, args.scaler_skips) == (3, 4, 5)
    assert args.notes == ["from gpuwatch.toml: --every 3", "from GPUWATCH_MAX_FRAMES: --max-frames 4"]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("every = 3", "every", 3),
        ('every = "3"', "every", 3),
        ("sync = true", "sync", True),
        ("sync = false", "sync", False),
        ('hang-timeout = "2m"', "hang_timeout", 120.0),
        ("hang_timeout = 90", "hang_timeout", 90.0),
        ('hang-timeout = "auto"', "hang_timeout", None),
        ("trace-batches = [0, 2]", "trace_batches", [0, 2]),
        ('trace-batches = "0,2"', "trace_batches", [0, 2]),
        ('watch = ["forward", "grads"]', "watch", ("forward", "grads")),
        ('modules = ["a.*", "b"]', "modules", ["a.*", "b"]),
        ('modules = "a.*"', "modules", ["a.*"]),
        ('on-hang = "abort"', "on_hang", "abort"),
        ('metrics-port = "9400"', "metrics_port", "127.0.0.1:9400"),
    ],
)
def test_a_value_is_read_as_on_the_command_line(line, name, value):
    save(line)
    assert getattr(parse_launch(["train.py"]), name) == value
    assert getattr(parse_run(["--", "true"]), name) == value


def test_what_is_typed_replaces_a_saved_list():
    save('modules = ["a.*", "b"]')
    assert parse_launch(["--modules", "c", "train.py"]).modules == ["c"]
    assert parse_launch(["train.py"]).modules == ["a.*", "b"]


def test_a_table_is_for_its_command_alone():
    save('preflight = "off"\nalloc = "5%"\n[run]\npreflight = "full"\n')
    assert parse_launch(["train.py"]).preflight == "off"
    assert parse_run(["true"]).preflight == "full"
    check = parse_check([])
    assert (check.preflight, check.alloc) == ("full", "5%"), "check has no --preflight"


def test_a_pyproject_counts_where_it_has_the_table():
    save('[tool.other]\nevery = "gpuwatch"\n', "pyproject.toml")
    assert parse_launch(["train.py"]).every == 1
    save("[tool.gpuwatch]\nevery = 7\n", "pyproject.toml")
    assert parse_launch(["train.py"]).notes == ["from pyproject.toml: --every 7"]
    save("every = 8")
    assert parse_launch(["train.py"]).every == 8, "a file of its own comes first"


def test_the_nearest_folder_above_counts_with_paths_of_its_own(project, monkeypatch):
    save('runs-dir = "my runs"\nevery = 2\n')
    below = project / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    args = parse_launch(["train.py"])
    assert (args.every, args.runs_dir) == (2, str(project / "my runs"))
    assert saved_runs_dir() == str(project / "my runs")


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_a_folder_above_of_another_user_does_not_count(project, monkeypatch):
    save("every = 2")
    below = project / "mine"
    below.mkdir()
    monkeypatch.chdir(below)
    os.chown(project, 12345, -1)
    assert parse_launch(["train.py"]).every == 1


def test_report_finds_the_saved_folder(monkeypatch):
    assert saved_runs_dir() == "gpuwatch-runs"
    save('runs-dir = "elsewhere"')
    assert saved_runs_dir() == "elsewhere"
    monkeypatch.setenv("GPUWATCH_RUNS_DIR", "there")
    assert saved_runs_dir() == "there" == parse_launch(["train.py"]).runs_dir


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("evry = 2", "gpuwatch.toml: expected an option of gpuwatch without its dashes, found 'evry'; did you mean"),
        ("[run]\nevry = 2", "found 'evry'"),
        ("nproc-per-node = 2", "found 'nproc-per-node'"),
        ('every = "x"', "gpuwatch.toml: every: expected a number of batches of 1 or more, or auto, found 'x'"),
        ("every = [1, 2]", "every: expected a number of batches of 1 or more, or auto, found '1,2'"),
        ("sync = 1", "sync: expected true or false, found 1"),
        ('on-hang = "kill"', "on-hang: expected one of report, auto, abort, found 'kill'"),
        ("[[[", "gpuwatch.toml: expected a TOML file that can be read"),
    ],
)
def test_a_wrong_file_is_one_sentence(text, sentence):
    save(text)
    with pytest.raises(UsageError) as caught:
        parse_launch(["train.py"])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_variable_is_one_sentence(monkeypatch):
    monkeypatch.setenv("GPUWATCH_SYNC", "maybe")
    with pytest.raises(UsageError, match="GPUWATCH_SYNC: expected true or false, found 'maybe'"):
        parse_launch(["train.py"])


def test_settings_are_shown_with_their_source(capsys, monkeypatch):
    save('every = 3\nnotify = "https://hooks.example.org/secret"\n')
    monkeypatch.setenv("GPUWATCH_TELEMETRY", "1m")
    for parse, line in ((parse_launch, []), (parse_launch, ["train.py"]), (parse_run, ["--", "true"])):
        with pytest.raises(SystemExit) as stop:
            parse(["--show-settings", "--max-frames", "7", *line])
        assert stop.value.code == 0
        shown = {words[0]: words[1:] for words in map(str.split, capsys.readouterr().out.splitlines())}
        assert shown["every"] == ["3", "gpuwatch.toml"]
        assert shown["telemetry"] == ["1m", "GPUWATCH_TELEMETRY"]
        assert shown["max-frames"] == ["7", "command", "line"]
        assert shown["notify"] == ["...", "gpuwatch.toml"], "an address may be a secret"
        assert shown["on-hang"] == ["auto", "default"]


def test_a_flag_is_shown_as_true_or_false(capsys, monkeypatch):
    shown = {}
    for line in ([], ["--capture", "--sync", "--nccl-debug"]):
        with pytest.raises(SystemExit):
            parse_launch(["--show-settings", *line, "train.py"])
        rows = [words.split() for words in capsys.readouterr().out.splitlines()]
        shown[len(line)] = {row[0]: row[1] for row in rows}
    flags = {name for name, value in shown[3].items() if value in ("true", "false")}
    assert flags == {"capture", "guard-optimizer", "nccl-debug", "sync"}
    assert {shown[0][name] for name in flags} == {"false"}
    assert {name for name in flags if shown[3][name] == "true"} == {"capture", "nccl-debug", "sync"}
    monkeypatch.setenv("GPUWATCH_CAPTURE", "0")
    with pytest.raises(SystemExit):
        parse_launch(["--show-settings", "train.py"])
    assert ["capture", "false", "GPUWATCH_CAPTURE"] in map(str.split, capsys.readouterr().out.splitlines())


def test_a_script_may_have_that_option_itself():
    args = parse_launch(["train.py", "--show-settings"])
    assert args.training_script_args == ["--show-settings"]
    assert parse_run(["--", "train", "--show-settings"]).command == ["train", "--show-settings"]


def test_no_secret_of_a_setting_is_shown(capsys, monkeypatch):
    command = "sh -c 'curl -H \"X-Api-Key: hunter2\" https://hooks.example.org/hunter2'"
    monkeypatch.setenv("GPUWATCH_NOTIFY", command)

    args = parse_launch(["train.py"])
    with pytest.raises(SystemExit):
        parse_launch(["--show-settings", "--notify", "https://hooks.example.org/hunter2"])

    assert args.notify == [command]
    assert [note for note in args.notes if "--notify" in note]
    assert "hunter2" not in " ".join(args.notes) + capsys.readouterr().out


@pytest.mark.parametrize("parse", [parse_launch, parse_check, lambda words: parse_run(["--", *words])])
def test_a_variable_that_is_typed_wrong_is_refused(parse, monkeypatch):
    monkeypatch.setenv("GPUWATCH_ERVY", "3")
    with pytest.raises(UsageError) as refused:
        parse(["train.py"])
    assert refused.value.text == (
        "GPUWATCH_ERVY: expected a variable that gpuwatch reads, found no such one; did you mean GPUWATCH_EVERY? "
        "(all options: gpuwatch launch --show-settings)"
    )


def test_a_variable_that_is_like_no_option_is_told_and_the_job_starts(monkeypatch):
    monkeypatch.setenv("GPUWATCH_HOME", "/opt/gpuwatch")
    assert parse_launch(["train.py"]).notes == ["GPUWATCH_HOME is set, and gpuwatch reads no such variable [GW426]"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("BATCH", "GPUWATCH_ABORT_AFTER_BATCH, GPUWATCH_TRACE_BATCHES"),
        ("HANG", "GPUWATCH_HANG_TIMEOUT, GPUWATCH_ON_HANG"),
        ("NPROC_PER_NODE", "PET_NPROC_PER_NODE, torchrun's"),
    ],
)
def test_a_variable_with_the_word_of_an_option_is_told_with_that(monkeypatch, name, near):
    monkeypatch.setenv(f"GPUWATCH_{name}", "1")
    (note,) = parse_launch(["train.py"]).notes
    assert note == f"GPUWATCH_{name} is set, and gpuwatch reads no such variable; near it: {near} [GW426]"


def test_variables_of_a_service_in_kubernetes_are_no_options(monkeypatch):
    """It gives them to each container of a namespace with a service that is named gpuwatch-collector."""
    for service in ("GPUWATCH", "GPUWATCH_COLLECTOR"):
        port = "tcp://10.0.0.11:29401"
        values = {"SERVICE_HOST": "10.0.0.11", "SERVICE_PORT": "29401", "SERVICE_PORT_METRICS": "9400", "PORT": port}
        values |= {"PORT_29401_TCP": port, "PORT_29401_TCP_ADDR": "10.0.0.11", "PORT_29401_TCP_PORT": "29401"}
        for name, value in values.items():
            monkeypatch.setenv(f"{service}_{name}", value)
    args = parse_launch(["train.py"])
    assert (args.collector_port, args.notes) == (None, [])


def test_every_variable_that_gpuwatch_itself_reads_is_known(monkeypatch):
    named = re.compile(r"GPUWATCH_[A-Z_]+")
    texts = (
        node.value
        for path in all_modules()
        if "GPUWATCH" in path.read_text()
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and named.fullmatch(node.value)
    )
    found = set(texts) - {"GPUWATCH_"}
    assert {"GPUWATCH_WORKER", "GPUWATCH_LATE_DEVICE", "GPUWATCH_RUNS_DIR"} <= found
    for name in found:
        monkeypatch.setenv(name, "")
    assert not [note for note in parse_launch(["train.py"]).notes if "reads no such variable" in note]
