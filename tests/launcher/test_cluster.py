from __future__ import annotations

from pathlib import Path

import pytest
from gpuwatch.core.errors import UsageError
from gpuwatch.launcher.fill_in import read_job
from gpuwatch.launcher.scheduler_job import SchedulerFacts
from gpuwatch.launcher.slurm_variables import PORTS, SLURM, rendezvous_port
from hypothesis import given
from hypothesis import strategies as st

from .environments import STEP

ENVIRONMENTS = Path(__file__).parents[1] / "data" / "slurm" / "environments"


def recorded(name: str) -> dict[str, str]:
    """What a real SLURM put into the environment of a process."""
    lines = (ENVIRONMENTS / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


@pytest.mark.parametrize(
    ("name", "nodes", "node_rank", "head", "rdzv_id", "nproc", "node", "in_step", "tasks"),
    [
        ("batch", 2, 0, "node1", "1.batch", "2", "node1", False, 1),
        ("step-node-0", 2, 0, "node1", "1.0", "2", "node1", True, 1),
        ("step-node-1", 2, 1, "node1", "1.0", "2", "node2", True, 1),
        # a step on the second node alone, in a job of two: what counts is the step
        ("step-of-one-node", 1, 0, "node2", "1.2", "2", "node2", True, 1),
        ("salloc-two-nodes", 2, None, "node1", "2.batch", None, None, False, 1),
        # of four GPUs in the job, two are on this node
        ("three-tasks-per-node", 2, 1, "node1", "8.0", "2", "node2", True, 3),
        ("uneven-tasks", 2, 1, "node1", "8.3", "2", "node2", True, 2),
        # SLURM_NTASKS_PER_NODE still says 3 there
        ("back-to-one-task", 2, 1, "node1", "8.1", "2", "node2", True, 1),
        # the nodes of both parts are one step; only the first has a GPU
        ("het-node-0", 2, 0, "node1", "4.1", "1", "node1", True, 1),
        ("het-node-1", 2, 1, "node1", "4.1", None, "node2", True, 1),
        # the step that is spoken of belongs to another job, on another node
        ("batch-with-stale-step", 1, 0, "node1", "7.batch", "2", "node1", False, 1),
        ("step-after-stale-step", 1, 0, "node1", "7.0", "2", "node1", True, 1),
    ],
)
def test_what_a_real_slurm_tells(name, nodes, node_rank, head, rdzv_id, nproc, node, in_step, tasks):
    job = read_job(recorded(name))
    assert job is not None
    assert (job.scheduler, job.nodes, job.node_rank, job.head) == (SLURM, (nodes, nodes), node_rank, head)
    assert (job.rdzv_id, job.nproc, job.node) == (rdzv_id, nproc, node)
    assert (job.in_step, job.tasks_per_node) == (in_step, tasks)
    assert job.job_id == rdzv_id.split(".")[0]
    assert job.port in PORTS


def test_every_recording_is_looked_at():
    parametrized = test_what_a_real_slurm_tells.pytestmark[0].args[1]
    assert {case[0] for case in parametrized} == {path.stem for path in ENVIRONMENTS.glob("*.env")}


def test_the_nodes_of_a_step_agree_on_where_they_meet():
    first, second = read_job(recorded("step-node-0")), read_job(recorded("step-node-1"))
    assert (first.head, first.port, first.rdzv_id, first.hosts) == (
        second.head,
        second.port,
        second.rdzv_id,
        second.hosts,
    )
    assert first.hosts == ("node1", "node2")


def test_the_example_of_the_docstring():
    assert read_job(STEP) == SchedulerFacts(
        SLURM,
        nodes=(2, 2),
        node_rank=1,
        head="gpu-007",
        port=20422,
        rdzv_id="4711.0",
        nproc="8",
        job_id="4711",
        node="gpu-008",
        hosts=("gpu-007", "gpu-008"),
    )


@pytest.mark.parametrize(
    ("change", "nproc"),
    [
        ({}, "8"),
        ({"SLURM_GPUS": "16"}, "8"),
        ({"SLURM_GPUS_PER_NODE": "4"}, "8"),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_GPUS_PER_NODE": "4"}, "4"),
        ({"SLURM_GPUS_ON_NODE": "h100:2"}, "2"),
        ({"SLURM_GPUS_ON_NODE": "h100:2,a100:1"}, "3"),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_GPUS_PER_NODE": "", "SLURM_GPUS": "16"}, None),
        ({"SLURM_GPUS_ON_NODE": "many", "SLURM_GPUS_PER_NODE": "h100:4"}, "4"),
        ({"SLURM_GPUS_ON_NODE": "0"}, None),
        # hidden by hand, or bound to the task
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, "8"),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7,8,9,10,11,12"}, "8"),
        ({"SLURM_GPUS_ON_NODE": "", "CUDA_VISIBLE_DEVICES": "0,1"}, None),
    ],
)
def test_processes_are_the_gpus_of_this_node(change, nproc):
    assert read_job({**STEP, **change}).nproc == nproc


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "4294967292", "4294967293"])
def test_the_batch_script_and_the_interactive_shell_are_no_steps(step):
    job = read_job({**STEP, "SLURM_STEP_ID": step, "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "2"})
    assert (job.in_step, job.nodes) == (False, (2, 2))


def test_a_job_that_was_requeued_meets_apart_from_its_former_self():
    first, again = read_job(STEP), read_job({**STEP, "SLURM_RESTART_COUNT": "1"})
    assert again.rdzv_id == "4711.0.1"
    assert again.port != first.port


def test_the_end_of_the_time_limit():
    assert read_job({**STEP, "SLURM_JOB_END_TIME": "1795251600"}).ends == 1795251600
    assert read_job(STEP).ends is None


def test_a_container_that_got_one_variable_only():
    job = read_job({"SLURM_JOB_ID": "4711"})
    assert (job.nodes, job.node_rank, job.head, job.nproc) == (None, None, None, None)


@given(st.integers(1, 10**9), st.integers(0, 200), st.integers(0, 20))
def test_the_port_is_even_and_in_the_range(job_id, step, restart):
    port = rendezvous_port(job_id, step, restart)
    assert port in PORTS
    assert port + 1 in PORTS
    assert port % 2 == 0


@given(st.integers(1, 10**9), st.integers(1, 999))
def test_jobs_near_each_other_and_steps_of_one_job_have_ports_of_their_own(job_id, more):
    ports = [rendezvous_port(job, step) for job in (job_id, job_id + more) for step in range(4)]
    assert len(set(ports)) == len(ports)


def test_nothing_in_the_environment_is_no_job():
    assert read_job({}) is None
    assert read_job({"PATH": "/bin", "NNODES": "", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": ""}) is None


def test_plain_variables():
    environ = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "3000", "NPROC_PER_NODE": "gpu"}
    job = read_job(environ)
    assert job == SchedulerFacts(None, nodes=(2, 2), node_rank=1, head="head", port=3000, nproc="gpu")
    assert read_job({"NNODES": "1:4"}) == SchedulerFacts(None, nodes=(1, 4))
    assert read_job({**environ, **STEP}) == read_job(STEP)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("SLURM_JOB_ID", "x", "whole number"),
        ("SLURM_STEP_NUM_NODES", "two", "number of nodes"),
        ("SLURM_STEP_NUM_NODES", "0", "number of nodes"),
        ("SLURM_STEP_NODELIST", "gpu-[1", "node list"),
        ("SLURM_NODEID", "-1", "whole number"),
        ("SLURM_RESTART_COUNT", "²", "whole number"),
        ("SLURM_STEP_TASKS_PER_NODE", "8x2", "tasks"),
        ("SLURM_JOB_END_TIME", "tomorrow", "whole number"),
    ],
)
def test_a_senseless_value_of_slurm_is_one_sentence(name, value, word):
    with pytest.raises(UsageError) as caught:
        read_job({**STEP, name: value})
    assert str(caught.value).startswith(f"{name}: expected ")
    assert word in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("NNODES", "two"), ("NODE_RANK", "first"), ("MASTER_PORT", "99999"), ("MASTER_PORT", "0"), ("NNODES", "4:2")],
)
def test_a_senseless_plain_value_is_one_sentence(name, value):
    with pytest.raises(UsageError) as caught:
        read_job({name: value})
    assert str(caught.value).startswith(f"{name}: expected ")


@given(st.sampled_from(sorted({*STEP, "SLURM_STEP_TASKS_PER_NODE", "CUDA_VISIBLE_DEVICES"})), st.text(max_size=10))
def test_any_value_is_read_or_refused(name, value):
    try:
        read_job({**STEP, name: value})
    except UsageError as error:
        assert "\n" not in str(error)
