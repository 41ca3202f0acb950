"""Hangs over the real ProcessGroupNCCL: the rank, from torch's flight recorder, however the others wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpuwatch.tests.needs import RELEASE

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_lines" / "waits.py"
STOPPED = "established" if hasattr(torch.distributed.ProcessGroup, "register_pre_hook") else "supported"
"""Of a rank whose torch cannot answer: from 2.14 on, its table has all that it has begun."""


def hang(folder, way, other, nproc=3, on_hang="auto", **environment):
    """(exit code, verdict, what gpuwatch has printed)"""
    command = [sys.executable, "-m", "gpuwatch.cli.main", "launch", "--standalone", "--nproc-per-node", str(nproc)]
    command += ["--preflight", "off", "--hang-timeout", "8", "--on-hang", on_hang, str(SCRIPT), way, other]
    variables = {**os.environ, "STAND_IN_CUDA_DEVICES": str(nproc), **environment}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=280)
    file = folder / "gpuwatch-runs" / "latest" / "report.json"
    assert file.is_file(), done.stderr
    return done.returncode, json.loads(file.read_text())["verdict"], done.stderr


@pytest.mark.parametrize(
    "way", ["to", "bool", "nonzero", "print", "float", "int", "if", "event", "backward", "ddp", "fsdp2"]
)
def test_a_rank_that_left_is_named_however_the_others_wait_and_the_job_ends(tmp_path, way):
    code, verdict, said = hang(tmp_path, way, "leave")

    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", 1, "established"), said
    assert "left early" in verdict["statement"]
    assert "(ending the ranks)" in said
    assert code == 5


def test_a_host_that_spins_waits_for_its_device(tmp_path):
    _, verdict, said = hang(tmp_path, "to", "leave", STAND_IN_CUDA_SPIN="1")

    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", 1, "established"), said
    assert "(ending the ranks)" in said


@pytest.mark.parametrize(
    ("other", "on_hang", "certainty", "words"),
    [
        ("sleep", "abort", "established", "It never reached all_reduce, in which ranks 0, 2 have waited"),
        ("stop", "auto", STOPPED, "It never reached all_reduce, in which ranks 0, 2 have waited"),
        ("order", "abort", "supported", "ranks 0, 2 wait in all_reduce; rank 1 waits in all_reduce of group 1"),
    ],
)
def test_a_rank_that_does_something_else_is_named(tmp_path, other, on_hang, certainty, words):
    _, verdict, said = hang(tmp_path, "to", other, on_hang=on_hang)

    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", 1, certainty), said
    assert words in verdict["statement"]
    assert "(ending the ranks)" in said


@pytest.mark.parametrize("way", ["recv", "pipeline"])
def test_a_rank_that_sends_nothing_is_named(tmp_path, way):
    # nccl2 has no flight recorder, and its rank's table shows a wait alone: such a job is not ended by itself
    _, verdict, said = hang(tmp_path, way, "leave", nproc=2, on_hang="abort" if RELEASE >= (2, 15) else "auto")

    assert (verdict["kind"], verdict["rank"]) == ("hang", 1), said
    assert "(ending the ranks)" in said


@pytest.mark.parametrize("way", ["to", "bool", "if", "event", "backward", "ddp", "fsdp2"])
def test_over_nccl2_which_records_nothing_the_ranks_own_tables_show_it(tmp_path, way):
    code, verdict, said = hang(tmp_path, way, "sleep", on_hang="abort", TORCH_DIST_USE_NCCL2="1")

    assert (verdict["kind"], verdict["rank"], verdict["certainty"]) == ("hang", 1, "established"), said
    assert "It never reached all_" in verdict["statement"]
    assert code == 5


def test_over_nccl2_a_rank_that_left_ends_the_job(tmp_path):
    code, verdict, said = hang(tmp_path, "to", "leave", TORCH_DIST_USE_NCCL2="1")

    assert (code, verdict["kind"], verdict["rank"], verdict["certainty"]) == (5, "hang", 1, "established"), said
    assert "(ending the ranks)" in said
