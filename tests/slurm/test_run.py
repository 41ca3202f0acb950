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
    assert done.stderr.count("VERDICT") == 1
    assert [rank["preflight"]["outcome"] for rank in report["ranks"]] == 4 * ["ok"]
