"""benchmarks/gpu_acceptance.py as a command, where there is no GPU: what it says, and that no line stops another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "benchmarks" / "gpu_acceptance.py"

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def acceptance(tmp_path, *options, before=""):
    """(finished process, rows of its JSON file). `before` is run in it first."""
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import gpu_acceptance\n{before}\n"
    code += f"sys.argv = ['gpu_acceptance.py', *{list(options)!r}]\nsys.exit(gpu_acceptance.main())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUWATCH")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    file = tmp_path / "gpu-acceptance.json"
    return done, json.loads(file.read_text())["rows"] if file.is_file() else []


@pytest.mark.slow
@no_gpu
def test_without_a_gpu_it_says_so_in_one_line():
    done = subprocess.run(
        ["make", "-s", "gpu", f"PYTHON={sys.executable}"], cwd=CHECKOUT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("gpuwatch: no GPU here, nothing to do (")


@pytest.mark.slow
def test_a_late_device_answers_what_it_can(tmp_path):
    done, rows = acceptance(tmp_path, "--device", "cpu-late", "--lines", "registration,syncs")

    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["line"], row["verdict"]) for row in rows] == [
        ("registration", "pass"),
        ("registration", "pass"),
        ("syncs", "skipped"),
    ]
    assert rows[0]["figure"] == "blocks.1.feed_forward.wo"
    for row in rows:
        assert f"| {row['line']} | {row['what']} | {row['verdict']} |" in done.stdout


@no_gpu
@pytest.mark.slow
def test_a_line_that_fails_stops_no_other_and_is_the_exit_code(tmp_path):
    options = ("--no-tests", "--lines", "syncs,bandwidth,environment")
    done, rows = acceptance(tmp_path, *options, before="gpu_acceptance.why_no_gpu = lambda: ''")

    assert done.returncode == 1
    assert {row["line"] for row in rows} == {"syncs", "bandwidth", "environment"}
    failed = [row for row in rows if row["verdict"] == "fail"]
    assert [row["line"] for row in failed][:2] == ["syncs", "bandwidth"]
    assert all(row["figure"] == "ended with exit code 1" and row["note"] for row in failed)
    assert any(row["line"] == "environment" and row["verdict"] == "pass" for row in rows)


@pytest.mark.slow
def test_a_line_that_hangs_is_ended(tmp_path):
    before = (
        "line, where = gpu_acceptance.LINES[0], gpu_acceptance.environment_of('cpu-late', '.')\n"
        "print(list(gpu_acceptance.run(line, 'cpu-late', where, 0.2)))\n"
        "sys.exit(7)"
    )
    done, _ = acceptance(tmp_path, before=before)

    assert done.returncode == 7, done.stderr
    assert "verdict='fail', figure='did not end within 0.2 s'" in done.stdout


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_what_it_has_found_and_another_goes_on(tmp_path):
    """It is killed, as a machine that is lent is taken away, as soon as the first line has written its rows."""
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import gpu_acceptance\n"
    code += "def hang(*_):\n    import time\n    yield gpu_acceptance.Row('begun', 'told')\n    time.sleep(3600)\n"
    code += "run = gpu_acceptance.run\n"
    code += "gpu_acceptance.run = lambda line, *rest: hang() if line.name == 'registration' else run(line, *rest)\n"
    options = ["gpu_acceptance.py", "--device", "cpu-late", "--lines", "environment,registration,syncs"]
    code += f"sys.argv = {options!r}\nsys.exit(gpu_acceptance.main())"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    with process:
        assert any("begun" in line for line in process.stdout), "the second line never began"
        process.kill()
    rows = json.loads((tmp_path / "gpu-acceptance.json").read_text())["rows"]
    assert {row["line"] for row in rows} == {"environment", "registration"}
    assert "| environment | packages that gpuwatch needs | pass |" in (tmp_path / "gpu-acceptance.md").read_text()

    done, rows = acceptance(tmp_path, *options[1:], "--after", "registration")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["line"] for row in rows][-2:] == ["registration", "syncs"]
    assert rows[0]["line"] == "environment"


@pytest.mark.slow
def test_a_line_for_which_no_time_is_left_is_not_begun_and_said(tmp_path):
    options = ("--device", "cpu-late", "--lines", "environment,registration", "--minutes", "0.01")
    done, rows = acceptance(tmp_path, *options)
    assert done.returncode == 0
    assert [row["verdict"] for row in rows] == ["skipped", "skipped"]
    assert all("not begun: the 0.01 minutes are over" in row["note"] for row in rows)


@pytest.mark.slow
def test_an_unknown_line_is_told_with_the_known_ones(tmp_path):
    done, _ = acceptance(tmp_path, "--lines", "bits,speed")

    assert done.returncode == 2
    assert "expected lines of environment, registration," in done.stderr
    assert "found 'speed'" in done.stderr
