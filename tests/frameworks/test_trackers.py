"""The lines of docs/export.md that put a report beside a tracker's run, as they stand there. No server, no network.

The trackers need not be installed beside gpuwatch: they are those that PATH has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
REPORT = "<!doctype html><title>the report of a test</title>"
pytestmark = pytest.mark.slow


def line_with(word: str) -> str:
    (found,) = [line.strip() for line in PAGE.read_text().splitlines() if line.startswith("    ") and word in line]
    return found


@pytest.fixture
def shell(tmp_path):
    """Runs a line where a run has ended, and gives what it printed."""
    folder = tmp_path / "gpuwatch-runs" / "latest"
    folder.mkdir(parents=True)
    (folder / "report.html").write_text(REPORT)

    def run(line: str, **environment: str) -> str:
        everything = {**os.environ, "HOME": str(tmp_path), **environment}
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=everything, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.skipif(shutil.which("mlflow") is None, reason="needs mlflow: pip install mlflow-skinny")
def test_mlflow_has_the_report(shell, tmp_path):
    store = {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    run = shell('python -c "import mlflow; print(mlflow.start_run().info.run_id)"', **store).split()[-1]
    shell(line_with("mlflow artifacts"), RUN_ID=run, **store)
    (kept,) = (tmp_path / "mlruns").glob(f"*/{run}/artifacts/report.html")
    assert kept.read_text() == REPORT


@pytest.mark.skipif(shutil.which("wandb") is None, reason="needs wandb")
def test_wandb_has_the_report(shell, tmp_path):
    shell(line_with("wandb.init"), RUN_ID="abc123", WANDB_MODE="offline", WANDB_DATA_DIR=str(tmp_path / "data"))
    (log,) = (tmp_path / "wandb").glob("offline-run-*/run-abc123.wandb")
    told = log.read_bytes()
    assert b"gpuwatch-report" in told and b"report.html" in told
    staged = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert REPORT in [path.read_text(errors="replace") for path in staged]
