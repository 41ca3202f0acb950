from __future__ import annotations

import time

import pytest
from gpuwatch.core.recorder.run_folder import job_run
from gpuwatch.launcher.scheduler_job import EndReason, SchedulerFacts
from gpuwatch.launcher.slurm_variables import SLURM, TIME_LIMIT, down_nodes, is_over_time, read_slurm_job, why_it_ends


@pytest.fixture
def no_commands(monkeypatch, tmp_path):
    """As in a container without SLURM's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(("seconds", "reason"), [(-1, TIME_LIMIT), (3600, "")])
def test_without_scontrol_the_environment_tells_of_the_time_limit(no_commands, seconds, reason):
    job = SchedulerFacts(SLURM, job_id="7", hosts=("gpu-1",), ends=int(time.time()) + seconds)
    assert why_it_ends(job) == EndReason(reason)


def test_where_nobody_tells_there_is_no_reason(no_commands):
    assert why_it_ends(SchedulerFacts(SLURM, job_id="7", hosts=("gpu-1",))) == EndReason()
    assert why_it_ends(SchedulerFacts(SLURM, ends=1)) == EndReason()


@pytest.mark.parametrize(
    ("variables", "job", "restart"),
    [
        ({}, "21", 0),
        ({"SLURM_RESTART_COUNT": "2"}, "21", 2),
        ({"SLURM_ARRAY_JOB_ID": "18", "SLURM_ARRAY_TASK_ID": "3"}, "18_3", 0),
    ],
)
def test_a_run_is_named_after_the_job_in_whichever_script_its_launch_stands(variables, job, restart):
    run = job_run(read_slurm_job({"SLURM_JOB_ID": "21", **variables}).new_run_name)
    assert run is not None
    assert (run.job, run.restart) == (job, restart)


def test_without_a_scheduler_a_run_is_named_after_no_job():
    assert SchedulerFacts(None, job_id="21").new_run_name == ""


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Stand-ins for SLURM's commands: each prints what it is given, if its arguments are those that are expected."""

    def make(name: str, arguments: str, output: str, code: int = 0) -> None:
        (tmp_path / f"{name}.out").write_bytes(output.encode("utf-8", "surrogateescape"))
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\n[ "$*" = "{arguments}" ] || exit 64\n/bin/cat {script}.out\nexit {code}\n')
        script.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    return make


SINFO = "--noheader --Node --nodes=gpu-1,gpu-2 --format=%N %T"
SCONTROL = "--oneliner show job 7"
OVER = "JobId=7 RunTime=00:01:01 TimeLimit=00:01:00"
JOB = SchedulerFacts(SLURM, job_id="7", hosts=("gpu-1", "gpu-2"), ends=int(time.time()) + 3600)


def test_a_node_that_is_down_comes_before_the_time_limit(commands):
    commands("sinfo", SINFO, "gpu-1 mixed\ngpu-2 down*\n")
    commands("scontrol", SCONTROL, OVER)
    assert why_it_ends(JOB) == EndReason("SLURM: a node of the job is down", ("gpu-2",), "sinfo")


def test_a_node_that_is_up_again_is_not_named(commands):
    commands("sinfo", SINFO, "gpu-1 completing\ngpu-2 idle\n")
    commands("scontrol", SCONTROL, "JobId=7 JobState=COMPLETING Reason=NodeDown Dependency=(null) NodeList=gpu-1")
    assert why_it_ends(JOB) == EndReason("SLURM: a node of the job is down", (), "scontrol")


def test_the_time_limit_is_told(commands):
    commands("sinfo", SINFO, "gpu-1 mixed\ngpu-2 mixed\n")
    commands("scontrol", SCONTROL, OVER)
    assert why_it_ends(JOB) == EndReason(TIME_LIMIT)


def test_scontrol_knows_of_a_time_limit_that_was_changed(commands):
    commands("sinfo", SINFO, "")
    commands("scontrol", SCONTROL, "JobId=7 RunTime=00:01:01 TimeLimit=00:09:00")
    assert why_it_ends(SchedulerFacts(SLURM, job_id="7", hosts=("gpu-1", "gpu-2"), ends=1)) == EndReason()


def test_commands_that_fail_or_print_nonsense_say_nothing(commands):
    commands("sinfo", SINFO, "gpu-2 down*\n", code=1)
    commands("scontrol", SCONTROL, "\udcff\udcfe")
    assert why_it_ends(JOB) == EndReason()


@pytest.mark.parametrize(
    ("job", "over"),
    [
        ("JobId=7 RunTime=00:01:01 TimeLimit=00:01:00 TimeMin=N/A", True),
        ("JobId=7 RunTime=1-00:00:01 TimeLimit=1-00:00:00 TimeMin=N/A", True),
        ("JobId=7 RunTime=00:00:59 TimeLimit=00:01:00 TimeMin=N/A", False),
        ("JobId=7 RunTime=23:59:59 TimeLimit=1-00:00:00 TimeMin=N/A", False),
        ("JobId=7 RunTime=5-00:00:00 TimeLimit=UNLIMITED TimeMin=N/A", False),
        ("", False),
    ],
)
def test_a_job_is_over_its_time_by_its_own_clocks(job, over):
    assert is_over_time(job) == over


def test_nodes_that_are_down_are_named_once():
    assert down_nodes("gpu-1 idle\ngpu-2 down*\ngpu-2 down*\ngpu-3 mixed\ngpu-4 allocated*\n") == ["gpu-2", "gpu-4"]
    assert down_nodes("") == []
