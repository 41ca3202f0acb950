"""Scripts that save and leave with an exit code of their own when SLURM sends their job a signal."""

import pytest

from .test_jobs import TEMPLATE, TWO_NODES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),  # one cluster for all of them
    pytest.mark.sample(1, of="a script that saves and leaves"),
]
SCRIPT = "saves_and_leaves.py"


def under_way(user, *words):
    """A job whose two ranks train."""
    job = user.sbatch(*words)
    for rank in range(2):
        job.says(f"rank {rank} is under way")
    return job


def is_interrupted(report, number):
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["rank"], verdict["signal"]) == ("interrupted", None, number)
    assert "ended with exit code 7, up to " in verdict["statement"]
    assert [rank["exit"] for rank in report["ranks"]] == [7, 7]


def test_scancel_of_a_launch(user):
    """SIGTERM comes to the launches; torchrun sends it to the ranks."""
    job = under_way(user, *TWO_NODES, TEMPLATE, user.script(SCRIPT), "SIGTERM")
    user.run("scancel", job.number)
    job.end()

    is_interrupted(user.report(), "SIGTERM")


def test_a_signal_to_the_ranks_of_a_step(user):
    """SIGUSR1 comes to all processes of the step, and `gpuwatch run` does not end for it."""
    command = f"srun gpuwatch run -- python {user.script(SCRIPT)} SIGUSR1 {user.cwd / 'store'}"
    job = under_way(user, "--nodes=1", "--ntasks-per-node=2", "--wrap", command)
    user.run("scancel", "--signal=USR1", f"{job.number}.0")
    job.end()

    report = user.report()
    is_interrupted(report, "SIGUSR1")
    assert report["verdict"]["statement"].startswith("SIGUSR1 reached ranks 0 and 1 from outside")


def test_a_rank_that_saves_for_long_is_told_to_end_once(user):
    """SIGTERM comes to all processes of the step. Rank 0 leaves at once; nobody is stopped for that, as below srun."""
    command = f"srun gpuwatch run -- python {user.script(SCRIPT)} SIGTERM {user.cwd / 'store'} 12"
    job = under_way(user, "--nodes=1", "--ntasks-per-node=2", "--wrap", command)
    user.run("scancel", "--signal=TERM", f"{job.number}.0")
    for rank in range(2):
        job.says(f"rank {rank} has saved, and heard 1")
    job.end()

    is_interrupted(user.report(), "SIGTERM")
