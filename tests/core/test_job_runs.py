from __future__ import annotations

import random

import pytest
from gpuwatch.core.recorder.run_folder import job_run, runs_of_job
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("name", "job", "restart", "again"),
    [
        ("20261121-091533-slurm-17", "17", 0, 1),
        ("20261121-091533-slurm-17-restart-1", "17", 1, 1),
        ("20261121-091533-slurm-18_3-restart-12", "18_3", 12, 1),
        ("20261121-091533-slurm-17-2", "17", 0, 2),
    ],
)
def test_a_runs_name_says_whose_it_is(name, job, restart, again):
    run = job_run(name)
    assert run is not None
    assert (run.job, run.restart, run.again, run.time) == (job, restart, again, "20261121-091533")


@pytest.mark.parametrize(
    "name", ["20261121-091533-66cb", "latest", "slurm-17", "20261121-091533-slurm-", "x" * 300, ""]
)
def test_other_runs_are_of_no_job(name):
    assert job_run(name) is None


def test_the_lives_of_a_job_in_their_order_and_of_each_the_last_run():
    names = [
        "20261121-091533-slurm-17",
        "20261121-091534-slurm-171",
        "20261121-101533-slurm-17-restart-9",
        "20261121-111533-slurm-17-restart-10",
        "20261121-111533-slurm-17-restart-10-2",
        "20251121-091533-slurm-17",
        "20261121-091533-slurm-17_1",
    ]
    random.Random(5).shuffle(names)
    assert [run.name for run in runs_of_job(names, "17")] == [
        "20261121-091533-slurm-17",
        "20261121-101533-slurm-17-restart-9",
        "20261121-111533-slurm-17-restart-10-2",
    ]


def test_a_job_of_the_same_number_that_is_older_is_left_out():
    names = ["20251121-091533-slurm-17-restart-3", "20261121-091533-slurm-17"]
    assert [run.name for run in runs_of_job(names, "17", "20261120-000000")] == ["20261121-091533-slurm-17"]


@given(st.text(max_size=40))
def test_any_name_may_lie_in_the_folder(name):
    run = job_run(name)
    assert run is None or run.name == name
