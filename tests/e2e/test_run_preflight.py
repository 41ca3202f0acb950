"""`gpuwatch run --preflight quick`: all ranks are tested before the script's own group, and nothing is left of it."""

import subprocess
import sys

import pytest

from .test_run_tasks import shared_folder, tasks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sample(3, of="the preflight of a run"),
]  # of those without a mark of their own
PYTHON = sys.executable
NEVER = ("--rank", "-1", "--batch", "2")
STAGES = ["inventory", "arrive", "consistency", "health", "allocation", "node group"]


def torchrun(bench, *arguments):
    script = bench.script("ddp_overflow.py")
    return (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, *arguments)


def spawn(bench, *arguments):
    return (PYTHON, bench.script("before_init.py"), *arguments)


def stages(report):
    return [{stage["stage"]: stage["grade"] for stage in rank["preflight"]["stages"]} for rank in report["ranks"]]


def test_the_script_finds_everything_as_without_it(bench):
    """Random states, environment, threads, sockets, and the bits of the training."""
    plain = subprocess.run(
        spawn(bench, *NEVER), cwd=bench.cwd, env=bench.environment, capture_output=True, text=True, timeout=400
    )
    run = bench.gpuwatch("run", "--preflight", "quick", "--", *spawn(bench, *NEVER))

    assert (run.code, plain.returncode) == (0, 0)
    assert len(plain.stdout.splitlines()) == 2 + 6
    assert sorted(run.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert (run.verdict["kind"], run.verdict["certainty"]) == ("clean", "established")
    assert stages(run.report) == 2 * [dict.fromkeys(STAGES, "ok")]
    assert "gpuwatch: preflight ok: 2 ranks on 1 node" in run.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [torchrun, spawn])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_the_bad_rank_is_named_and_nothing_is_trained(bench, command, bad_rank):
    bad = {"BAD_PROBE": "dies", "BAD_RANK": str(bad_rank), "PYTHONPATH": bench.script("bad_probe")}
    run = bench.gpuwatch("run", "--preflight", "quick", "--", *command(bench, *NEVER), **bad)

    assert run.code == 3
    assert run.stdout == ""
    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["stage"]) == ("preflight", bad_rank, "node group")
    assert f"preflight failed in stage node group: rank {bad_rank}" in run.stderr


def test_the_tasks_of_a_host_are_tested_together(bench):
    ended = [bench.finish(process) for process in tasks(bench, *NEVER, options=("--preflight", "quick"))]

    assert [run.code for run in ended] == [0, 0]
    assert (ended[0].verdict["kind"], ended[0].verdict["certainty"]) == ("clean", "established")
    assert stages(ended[0].report) == 2 * [dict.fromkeys(STAGES, "ok")]
    assert not shared_folder(bench).exists()


def test_ranks_that_come_one_after_another_train_without_it(bench):
    options = ("--preflight", "quick", "--preflight-timeout", "1")
    run = bench.gpuwatch("run", *options, "--", *spawn(bench, *NEVER), LATE="1")

    assert run.code == 0
    words = "the preflight is skipped: rank 1 of 2 did not reach init_process_group within 1 s of rank 0"
    assert words in run.stderr
    assert (run.verdict["kind"], run.verdict["certainty"]) == ("clean", "established")


def test_a_process_that_joins_no_group_is_told_so(bench):
    run = bench.gpuwatch("run", "--preflight", "quick", "--", PYTHON, bench.script("alone.py"))

    assert (run.code, run.verdict["kind"]) == (0, "clean")
    assert "there was no preflight: no rank has called init_process_group" in " ".join(run.stderr.split())
