"""A group's timeout over the real ProcessGroupNCCL: the rank that did not come is named, and never one that waited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "group_times_out.py"
AT_ONCE = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
"""The watchdog waits for no more dumps of the others than for a second."""
BLOCKING = {"TORCH_NCCL_BLOCKING_WAIT": "1"}


def launch(folder, way, *options, **environment):
    """(verdict, how the waiting rank ended, what gpuwatch has printed)"""
    command = [sys.executable, "-m", "gpuwatch.cli.main", "launch", "--standalone", "--nproc-per-node", "2"]
    command += ["--preflight", "off", *options, str(SCRIPT), way, "10"]
    variables = {**os.environ, "STAND_IN_CUDA_DEVICES": "2", **AT_ONCE, **environment}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=280)
    file = folder / "gpuwatch-runs" / "latest" / "report.json"
    assert file.is_file(), done.stderr
    report = json.loads(file.read_text())
    return report["verdict"], {one["rank"]: one for one in report["ranks"]}[0], done.stderr


@pytest.mark.parametrize(
    ("way", "environment"),
    [
        ("reduce", {}),
        ("ddp", {}),
        ("reduce", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
        ("wait", BLOCKING),
        ("barrier", {}),
    ],
)
def test_who_did_not_come_is_named_where_the_timeout_ends_the_rank_that_waited(tmp_path, way, environment):
    verdict, waited, said = launch(tmp_path, way, **environment)

    assert (verdict["kind"], verdict["rank"]) == ("hang", 1), said
    assert "group_times_out.py:16 in elsewhere" in verdict["statement"]
    assert "Watchdog caught collective operation timeout" in said
    assert "(the timeout of its process group, 10 s, ends the job)" in said
    assert ("DistBackendError" in str(waited["error"])) == (environment == BLOCKING)


@pytest.mark.parametrize(
    ("way", "environment"),
    [
        pytest.param("reduce", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, id="the watchdog only reports"),
        pytest.param("barrier", BLOCKING, id="no watchdog, and a call that waits itself"),
    ],
)
def test_where_no_timeout_ends_the_rank_that_waits_the_limit_of_gpuwatch_counts(tmp_path, way, environment):
    options = ("--hang-timeout", "8", "--on-hang", "abort")
    verdict, _, said = launch(tmp_path, way, *options, **environment)

    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", 1, "established"), said
    assert "(ending the ranks)" in said
    assert "ends the job" not in said
