"""A CUDA graph has a whole step of DDP: its reductions, which C++ issues, are in it, and gpuwatch reads around them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_gpuwatch import SCRIPTS, launch_script
from test_graphs import with_hooks

pytestmark = with_hooks
BATCH = 11 + 1 + 3
"""That of the fourth replay, behind the warm-up and the capture"""
NOT_SEEN = "graph: not seen"


def launch(folder, *arguments):
    return launch_script("whole_steps.py", folder, 2, "cuda", "nccl", *arguments, options=("--preflight", "off"))


def faults(report):
    return [fault[: len(NOT_SEEN)] for rank in report["ranks"] for fault in rank["faults"]]


@pytest.fixture(scope="module")
def plain():
    """What the ranks print without gpuwatch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPTS / "whole_steps.py"), "--device", "cuda", "--backend", "nccl"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=280)
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert len(lines) == 2 * 7, done.stderr
    return lines


def test_a_clean_graph_on_the_stream_of_the_warm_up_is_clean_with_the_same_bits(tmp_path, plain):
    verdict, found, report = launch(tmp_path / "cuda")
    assert (verdict["kind"], verdict["certainty"]) == ("clean", "established")
    assert (found, faults(report)) == (plain, [])


def test_gradients_on_a_stream_that_is_not_the_captures_are_not_seen_and_never_clean(tmp_path, plain):
    """DDP keeps the nodes that accumulate them, and so the stream of the warm-up."""
    verdict, found, report = launch(tmp_path / "cuda", "--own-stream")
    assert verdict["kind"] == "unknown"
    assert (found, faults(report)) == (plain, [NOT_SEEN] * 2)


@pytest.mark.parametrize(("options", "certainty"), [((), "established"), (("--own-stream",), "supported")])
def test_an_overflow_in_a_replay_of_one_rank_is_named(tmp_path, options, certainty):
    verdict, _, _ = launch(tmp_path / "cuda", "--fault", "forward", *options)
    assert tuple(verdict[key] for key in ("rank", "module", "value", "phase", "batch", "certainty")) == (
        *(1, "block.widen", "+inf", "forward", BATCH, certainty),
    )


def test_a_sum_that_overflows_in_the_reduction_of_a_replay_is_no_ranks_own(tmp_path):
    """fp16_compress_hook halves the bits of gradients that are finite on each rank."""
    verdict, _, report = launch(tmp_path / "cuda", "--fault", "reduction")
    assert (verdict["kind"], verdict["value"], verdict["batch"]) == ("overflow", "+inf", BATCH)
    assert "every rank's own gradient was finite" in report["verdict"]["statement"]
