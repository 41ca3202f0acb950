"""What Tab offers, as click asks for it, and in a real bash."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete
from gpuwatch.cli.main import COMMANDS, cli


def offered(*words: str) -> list[str]:
    *before, last = words
    found = ShellComplete(cli, {}, "gpuwatch", "_GPUWATCH_COMPLETE").get_completions(list(before), last)
    return [item.value for item in found]


def test_commands_and_their_options():
    assert offered("") == list(COMMANDS)
    assert offered("re") == ["report", "replay"]
    assert offered("report", "--f") == ["--format"]
    assert offered("report", "--format", "") == ["text", "json", "html"]
    assert offered("export", "--format", "p") == ["parquet", "perfetto"]


def test_options_that_argparse_parses_and_files_behind_them():
    assert "--trace-batches" in offered("run", "--tr")
    (item,) = ShellComplete(cli, {}, "gpuwatch", "x").get_completions(["run"], "tra")
    assert (item.value, item.type) == ("tra", "file")


def test_the_words_that_an_option_takes():
    assert offered("run", "--on-overflow", "") == ["abort", "continue"]
    assert offered("run", "--every", "3", "--preflight", "f") == ["full"]
    assert offered("run", "--every", "") == [""], "files"


@pytest.mark.slow
def test_options_of_torchrun_and_ours_for_launch_and_check():
    assert {"--nproc-per-node", "--nnodes"} <= set(offered("launch", "--n"))
    assert "--on-overflow" in offered("launch", "--on-")
    assert "--bandwidth" in offered("check", "--band") or offered("check", "--")


@pytest.mark.parametrize("command", ["report", "diff", "export", "top"])
def test_names_of_runs(command, tmp_path, monkeypatch):
    for name in ("20260101-a", "20260202-b"):
        (tmp_path / "gpuwatch-runs" / name).mkdir(parents=True)
        (tmp_path / "gpuwatch-runs" / name / "run.sqlite").touch()
    (tmp_path / "gpuwatch-runs" / "no-run").mkdir()
    monkeypatch.chdir(tmp_path)
    assert offered(command, "") == ["20260202-b", "20260101-a"]
    assert offered(command, "202601") == ["20260101-a"]
    assert offered(command, "--runs-dir", "elsewhere", "") == []


def test_codes():
    assert offered("explain", "gw10") == [f"GW10{number}" for number in range(1, 9)]


def test_bash_asks_and_is_answered(tmp_path):
    """The line of docs/first-run.md, and Tab after it as bash calls it."""
    bin_ = tmp_path / "gpuwatch"
    bin_.write_text(
        f"#!{sys.executable}\nimport sys\nfrom gpuwatch.cli.main import main\nsys.argv[0] = 'gpuwatch'\nmain()\n"
    )
    bin_.chmod(0o755)
    asked = (
        'eval "$(_GPUWATCH_COMPLETE=bash_source gpuwatch)"\n'
        "COMP_WORDS=(gpuwatch rep); COMP_CWORD=1; _gpuwatch_completion gpuwatch rep gpuwatch\n"
        'printf "%s\\n" "${COMPREPLY[@]}"; complete -p gpuwatch\n'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.splitlines()[0] == "report", done.stderr
    assert "-F _gpuwatch_completion gpuwatch" in done.stdout
