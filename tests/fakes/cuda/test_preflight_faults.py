"""The preflight over the real ProcessGroupNCCL, with a fault in one rank's NCCL: that rank, or "not known"."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONS = ("--alloc", "16MiB", "--bandwidth-size", "1MiB")


@pytest.mark.parametrize(
    ("nproc", "fault", "rank", "words"),
    [
        (2, "", None, ""),
        (2, "1:bad-sum", 1, "rank 1 computes wrong sums"),
        (2, "0:die-op", 0, "rank 0 (.*) died at all_reduce: "),
        (2, "1:hang-init", None, "the rank at fault is unknown"),
        (3, "1:hang-init", 1, "rank 1 (.*) works with none of the 2 ranks that it was tried with"),
        (3, "1:silent-op", 1, "rank 1 (.*) works with none of the 2 ranks that it was tried with"),
    ],
)
def test_a_fault_of_nccl_is_laid_to_its_rank_or_to_none(tmp_path, nproc, fault, rank, words):
    options = "--nproc-per-node", str(nproc), *OPTIONS
    command = [sys.executable, "-m", "gpuwatch.cli.main", "check", "--standalone", *options]
    environment = {"STAND_IN_NCCL_FAULT": fault, "STAND_IN_CUDA_DEVICES": str(nproc), "STAND_IN_CUDA_MEMORY_MIB": "256"}
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    report = json.loads((tmp_path / "gpuwatch-runs" / "latest" / "report.json").read_text())

    assert done.returncode == (3 if fault else 0), done.stderr
    # torchrun may stop a rank before it has written its conclusion
    assert {each["preflight"]["backend"] for each in report["ranks"]} - {""} == {"nccl"}
    assert report["verdict"]["rank"] == rank
    assert re.search(words, report["verdict"]["statement"])


@pytest.mark.parametrize(
    "options",
    [
        ("--ranks", "3", "--at", "2", "--fault", "fail-init", "fail-op"),
        *[pytest.param(("--ranks", size), marks=pytest.mark.soak) for size in ("2", "3", "8")],
    ],
    ids=" ".join,
)
@pytest.mark.timeout(3 * 3600)
def test_each_fault_in_each_place_is_laid_to_its_rank_or_to_none(options):
    script = Path(__file__).parent / "preflight_faults.py"
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
