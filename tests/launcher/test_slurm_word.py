from __future__ import annotations

import time

import pytest
from gpuwatch.launcher.cluster import Job
from gpuwatch.launcher.slurm_word import TIME_LIMIT, SlurmWord, ask_slurm, down_nodes, is_over_time


@pytest.fixture
def no_commands(monkeypatch, tmp_path):
    """As in a container without SLURM's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(("seconds", "reason"), [(-1, TIME_LIMIT), (3600, "")])
def test_without_scontrol_the_environment_tells_of_the_time_limit(no_commands, seconds, reason):
    job = Job("slurm", job_id="7", hosts=("gpu-1",), ends=int(time.time()) + seconds)
    assert ask_slurm(job) == SlurmWord(reason)


def test_where_nobody_tells_there_is_no_reason(no_commands):
    assert ask_slurm(Job("slurm", job_id="7", hosts=("gpu-1",))) == SlurmWord()
    assert ask_slurm(Job("plain", ends=1)) == SlurmWord()
    assert ask_slurm(None) == SlurmWord()


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
