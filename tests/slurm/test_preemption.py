"""Scripts that save and leave with an exit code of their own when SLURM sends their job a signal."""

import pytest

from .test_jobs import TEMPLATE, TWO_NODES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),  # one cluster for all of them
    pytest.mark.sample(1, of="a script that saves and leaves"),
]
SCRIPT = "saves_and_leaves.py"


def is_interrupted(report, number):
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["rank"], verdict["signal"]) == ("interrupted", None, number)
    assert "ended with exit code 7, up to " in verdict["statement"]
    assert verdict["statement"].endswith(f"after {number} had reached them.")
    assert [rank["exit"] for rank in report["ranks"]] == [7, 7]


def test_scancel_of_a_launch(user):
    job = user.sbatch(*TWO_NODES, TEMPLATE, user.script(SCRIPT), "SIGTERM")
    for rank in range(2):
        job.says(f"rank {rank} is under way")
    user.run("scancel", job.number)
    job.end()

    is_interrupted(user.report(), "SIGTERM")


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_to_all_processes_of_a_step_of_ranks(user, name):
    command = f"srun gpuwatch run -- python {user.script(SCRIPT)} SIG{name} {user.cwd / 'store'}"
    job = user.sbatch("--nodes=1", "--ntasks-per-node=2", "--wrap", command)
    for rank in range(2):
        job.says(f"rank {rank} is under way")
    user.run("scancel", f"--signal={name}", f"{job.number}.0")
    job.end()

    is_interrupted(user.report(), f"SIG{name}")
