"""`srun --ntasks-per-node 2 gpuwatch run`: a task for each rank on two nodes, one agent a node, one report."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]


def test_four_tasks_on_two_nodes(user):
    options = ("--nodes=2", "--ntasks-per-node=2")
    command = ("python", user.script("own_init.py"), str(user.cwd / "store"), "--rank", "2", "--batch", "2")
    done = user.run("srun", *options, "gpuwatch", "run", "--preflight", "quick", "--", *command)

    assert done.returncode == 4, done.stderr
    report = user.report()
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2, 3]
    assert len(report["nodes"]) == 2
    assert len({rank["host"] for rank in report["ranks"]}) == 2
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["rank"], verdict["module"]) == ("overflow", 2, "block.widen")
    assert done.stderr.count("gpuwatch report: run") == 1
    assert [rank["preflight"]["outcome"] for rank in report["ranks"]] == 4 * ["ok"]


@pytest.mark.soak
def test_lightning_requeues_its_job_at_slurms_warning(user):
    """As its docs have it: SIGUSR1 comes to all processes of the step, and it saves, and asks SLURM to start anew."""
    pytest.importorskip("lightning")
    script = user.script("lightning_requeued.py")
    command = f"srun gpuwatch run -- python {script}"
    job = user.sbatch("--nodes=1", "--ntasks-per-node=2", "--requeue", "--open-mode=append", "--wrap", command)
    for rank in range(2):
        job.says(f"rank {rank} waits")
    user.run("scancel", "--signal=USR1", f"{job.number}.0")

    assert job.end() == "0:0"
    assert job.facts["Restarts"] == "1"
    assert [job.output.count(f"rank {rank} saves step 3\n") for rank in range(2)] == [1, 1], "it heard the signal once"
    assert [job.output.count(f"rank {rank} step 3 ") for rank in range(2)] == [1, 1], "its second life goes on there"
    first, second = user.reports()
    assert (first["verdict"]["kind"], first["verdict"]["rank"]) == ("interrupted", None)
    assert (second["verdict"]["kind"], second["verdict"]["certainty"]) == ("clean", "established")
