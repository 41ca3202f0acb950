"""A launch without options in what a scheduler's job looks like to it: its environment. Here on one host."""

import os
from collections.abc import Iterator

import pytest
from gpuwatch.launcher.slurm_variables import rendezvous_port

from ..ports import ports_of_this_test


@pytest.fixture
def job_id() -> Iterator[int]:
    """A job whose rendezvous has a free port, and its collector, too; both are this test's until it ends."""
    jobs = {rendezvous_port(job, 0): job for job in range(os.getpid(), os.getpid() + 500)}
    with ports_of_this_test((port, port + 1) for port in jobs) as (port, _):
        yield jobs[port]


def step(job_id: int, node_rank: int) -> dict[str, str]:
    """What a task of `srun --ntasks 2 --ntasks-per-node 1` sees."""
    return {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "localhost,localhost",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": str(node_rank),
        "SLURMD_NODENAME": "localhost",
        "SLURM_GPUS_ON_NODE": "1",
    }


@pytest.mark.slow
def test_two_nodes_of_a_slurm_job_find_each_other(bench, job_id):
    command = ("launch", bench.script("ddp_overflow.py"), "--rank", "1", "--batch", "2")
    nodes = [bench.start("gpuwatch.cli.main", *command, **step(job_id, node_rank)) for node_rank in (0, 1)]
    head, other = [bench.finish(process) for process in nodes]

    assert [head.code, other.code] == [4, 4]
    assert (head.report["run"]["nnodes"], head.report["run"]["world_size"]) == (2, 2)
    assert (head.verdict["rank"], head.verdict["module"]) == (1, "block.widen")
    assert "the report will be in" in head.stderr
    assert "the report will be in" not in other.stderr
    assert head.report["run"]["id"].endswith(f"-slurm-{job_id}")
    assert head.report["run"]["id"] in bench.gpuwatch("report", str(job_id)).stdout


@pytest.mark.slow
def test_two_nodes_of_plain_variables_find_each_other(bench, port):
    plain = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NPROC_PER_NODE": "1"}
    nodes = [
        bench.start("gpuwatch.cli.main", "check", "--quick", **plain, NODE_RANK=node_rank) for node_rank in ("0", "1")
    ]
    runs = [bench.finish(process) for process in nodes]

    assert [run.code for run in runs] == [0, 0]
    assert runs[0].report["run"]["nnodes"] == 2


def test_a_batch_script_without_srun_is_told_so(refused):
    batch = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu-[1-2]", "SLURM_NODEID": "0"}
    code, _, stderr = refused("launch", "train.py", **batch)

    assert code == 2
    assert stderr.startswith("gpuwatch: SLURM job 7 has 2 nodes, and this runs on one of them only")
    assert stderr.count("\n") == 1
