"""A rank that cannot take part is named before the training starts. The faults are put into the real probe process."""

import signal
import time

import pytest


@pytest.mark.parametrize(
    ("way", "stage", "words"),
    [
        ("dies", "all_gather", "killed by SIGKILL"),
        pytest.param("hangs", "all_gather", "hung in stage all_gather", marks=pytest.mark.slow),
        ("adds wrong", "all_reduce", "all_reduce over 2 ranks gave"),
        ("no memory", "allocation", "OutOfMemoryError"),
    ],
)
def test_the_bad_rank_and_its_stage_are_named(bench, way, stage, words):
    began = time.monotonic()
    run = bench.launch("clean.py", "--preflight-timeout", "12", BAD_PROBE=way, PYTHONPATH=bench.script("bad_probe"))

    assert run.code == 3
    assert time.monotonic() - began < 60
    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["stage"]) == ("preflight", 1, stage)
    assert words in verdict["statement"]
    assert "rank 0 step" not in run.stdout
    states = {rank["rank"]: rank["preflight"]["outcome"] for rank in run.report["ranks"]}
    assert states[1] == "failed"
    assert states[0] in ("ok", "victim")


def test_a_rank_that_sends_wrong_values_is_named_by_the_others(bench):
    run = bench.launch("clean.py", BAD_PROBE="lies", PYTHONPATH=bench.script("bad_probe"))

    assert run.code == 3
    assert (run.verdict["rank"], run.verdict["stage"]) == (1, "all_gather")


def test_a_failure_is_not_restarted(bench):
    run = bench.launch("clean.py", "--max-restarts", "3", BAD_PROBE="no memory", PYTHONPATH=bench.script("bad_probe"))

    assert run.code == 3
    assert run.report["run"]["attempts"] == 1


def test_training_starts_all_the_same_when_asked_to(bench):
    run = bench.launch(
        "clean.py",
        "--on-preflight-failure",
        "continue",
        BAD_PROBE="no memory",
        PYTHONPATH=bench.script("bad_probe"),
    )

    assert run.code == 0
    assert "rank 0 step 9" in run.stdout
    assert run.verdict["kind"] == "clean"
    assert run.report["ranks"][1]["preflight"]["outcome"] == "failed"


def test_it_can_be_left_out(bench):
    run = bench.launch("clean.py", "--preflight", "off")

    assert run.code == 0
    assert {rank["preflight"]["outcome"] for rank in run.report["ranks"]} == {"off"}


def test_ctrl_c_ends_a_preflight_that_hangs(bench):
    launch = bench.start(
        "gpuwatch.cli.main",
        "launch",
        "--nproc-per-node",
        "2",
        bench.script("clean.py"),
        BAD_PROBE="hangs",
        PYTHONPATH=bench.script("bad_probe"),
    )
    while len(bench.running("gpuwatch.worker.probe")) < 2:
        assert launch.poll() is None
    launch.send_signal(signal.SIGINT)
    run = bench.finish(launch)

    assert run.code == 130
    assert run.verdict["kind"] == "interrupted"
