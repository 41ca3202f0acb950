"""The preflight over the real ProcessGroupNCCL, with a fault in one rank's NCCL: that rank, or "not known"."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

OPTIONS = ("--nproc-per-node", "2", "--alloc", "16MiB", "--bandwidth-size", "1MiB")


@pytest.mark.parametrize(
    ("fault", "rank", "words"),
    [
        ("", None, ""),
        ("1:bad-sum", 1, "rank 1 computes wrong sums"),
        ("1:hang-init", None, "the rank at fault is unknown"),
    ],
)
def test_a_fault_of_nccl_is_laid_to_its_rank_or_to_none(tmp_path, fault, rank, words):
    command = [sys.executable, "-m", "gpuwatch.cli.main", "check", "--standalone", *OPTIONS]
    environment = {**os.environ, "STAND_IN_NCCL_FAULT": fault}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    report = json.loads((tmp_path / "gpuwatch-runs" / "latest" / "report.json").read_text())

    assert done.returncode == (3 if fault else 0), done.stderr
    assert [each["preflight"]["backend"] for each in report["ranks"]] == ["nccl", "nccl"]
    assert report["verdict"]["rank"] == rank
    assert words in report["verdict"]["statement"]
