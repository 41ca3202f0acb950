"""The job that a launch is part of: what the environment says of it, and what its user then need not say.

The environment is read and typed here, once, and nowhere else. One table for each scheduler (slurm_variables.py), one
for MPI, and one for plain variables, as scripts around torchrun and Kubernetes manifests set them. On the second node
of a step of two:

    SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu-[007-008] SLURM_NODEID=1 SLURM_GPUS_ON_NODE=8 ...
    SchedulerFacts(SLURM, nodes=(2, 2), node_rank=1, head="gpu-007", port=20422, rdzv_id="4711.0", nproc="8", ...)

It opens no file and runs no command: many containers lack the scheduler's commands. A filled-in value never replaces
one that the user gave.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..core.codes import Code
from ..core.errors import UsageError
from ..core.guest.tell import say
from .option_types import bracketed, parse_nnodes
from .plan import C10D_DEFAULT_PORT, add_rendezvous_conf
from .saved_settings import given_options
from .scheduler_job import JobVariable, SchedulerFacts, nodes, port, read_facts, whole
from .slurm_variables import SLURM

_SCHEDULERS = (SLURM,)

_MEETS = {"head": JobVariable(("MASTER_ADDR",)), "port": port(("MASTER_PORT",))}
_PLAIN = {
    "nodes": nodes(("NNODES",)),
    "node_rank": whole(("NODE_RANK",)),
    **_MEETS,
    "nproc": JobVariable(("NPROC_PER_NODE",)),
}


def read_job(environ: Mapping[str, str]) -> SchedulerFacts | None:
    """The job that this process is part of; None without a job's variables. Raises UsageError on a senseless value."""
    for scheduler in _SCHEDULERS:
        if any(environ.get(name, "").strip() for name in scheduler.variables["job_id"].names):
            return scheduler.read(environ)
    facts = read_facts(_PLAIN, environ)
    return SchedulerFacts(None, **facts) if any(value is not None for value in facts.values()) else None


def read_task(environ: Mapping[str, str]) -> SchedulerFacts | None:
    """The same for a command of which each task is one process.

    mpirun, or a script that starts each rank itself, may run inside of a scheduler's job.
    """
    if (found := read_mpi_job(environ)) is not None:
        return found
    job, by_hand = read_job(environ), _read_ranks_by_hand(environ)
    if job is None or by_hand is None:
        return job or by_hand
    if job.scheduler is None:
        return job if job.nodes is not None and job.nodes[1] > 1 else by_hand
    return job if job.in_step else replace(job, tasks_here=by_hand.tasks_here)


def variables(job: SchedulerFacts, fact: str) -> str:
    """The names that a fact may have, for a sentence: `SLURM_STEP_NUM_NODES or SLURM_NNODES`."""
    return " or ".join((job.scheduler.variables if job.scheduler is not None else _PLAIN)[fact].names)


# What mpirun tells the processes that it starts. It starts a task for each rank, and the tasks of one host share a
# parent. It fills one host after the other (`--map-by slot`); with another mapping, the
# user gives this host's --node-rank.

_MPI = {
    "size": whole(("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")),
    "rank": whole(("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")),
    "tasks_here": whole(("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")),
    "job_id": JobVariable(("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_KVS")),
    **_MEETS,
}


def read_mpi_job(environ: Mapping[str, str]) -> SchedulerFacts | None:
    """The job that MPI's variables describe; None without them. Raises UsageError on a senseless value."""
    if not any(environ.get(name, "").strip() for name in _MPI["tasks_here"].names):
        return None
    facts = read_facts(_MPI, environ)
    size, rank, here = facts["size"], facts["rank"], facts["tasks_here"]
    if not size or not here or rank is None:
        return None
    hosts = -(-size // here)
    return SchedulerFacts(
        None,
        nodes=(hosts, hosts),
        node_rank=rank // here,
        head=facts["head"],
        port=facts["port"],
        rdzv_id=facts["job_id"] or f"mpi.{os.getppid()}" if hosts == 1 else facts["job_id"],
        tasks_per_node=here,
        tasks_here=here,
    )


# What a script sets that starts each rank of one host by itself, as torch's manual has it for init_method="env://".

_BY_HAND = {
    "size": whole(("WORLD_SIZE",)),
    "rank": whole(("RANK",)),
    "tasks_here": whole(("LOCAL_WORLD_SIZE",)),
    **_MEETS,
}
_KUBERNETES = "KUBERNETES_SERVICE_HOST"
"""Each pod has it. There RANK may be the pod's own, and MASTER_ADDR `localhost` in the first one alone."""


def _read_ranks_by_hand(environ: Mapping[str, str]) -> SchedulerFacts | None:
    """The job whose ranks are all of this host, one task each; None if the variables do not say so."""
    try:
        facts = read_facts(_BY_HAND, environ)
    except UsageError:  # another program's variable of that name
        return None
    size, rank, here, head = facts["size"] or 0, facts["rank"], facts["tasks_here"], facts["head"]
    if here is None and head in ("localhost", "127.0.0.1", "::1") and _KUBERNETES not in environ:
        here = size
    if size < 2 or here != size or rank is None or rank >= size or not head or not facts["port"]:
        return None
    place = f"{head}:{facts['port']}"
    return SchedulerFacts(None, nodes=(1, 1), node_rank=0, rdzv_id=place, tasks_per_node=size, tasks_here=size)


_NAME_WAIT_S = 30.0
"""A node that was started for this job may be in the name service some seconds later."""


def fill_in_from_job(
    args: argparse.Namespace, make_parser: Callable[[], argparse.ArgumentParser], arguments: list[str]
) -> SchedulerFacts | None:
    """Complete the options from the job that this launch is part of, and say what came out. Returns the job, if any."""
    job = read_job(os.environ)
    if job is None:
        return None
    meets_there = fill_in(args, given_options(make_parser(), arguments, os.environ), job, count_gpus)
    if job.scheduler is not None and meets_there:
        assert job.head is not None
        if job.node_rank == 0:
            most = parse_nnodes(args.nnodes)[1]
            say(f"{job.name}: {most} nodes meet at {args.rdzv_endpoint or job.head}")
        expect_address(job.head, _NAME_WAIT_S)
    return job


def count_gpus() -> int:
    """Those that torch sees on this node."""
    import torch  # a scheduler has not said how many

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def expect_address(host: str, limit_s: float) -> None:
    """The name of the job's head must mean something here, soon. Raises UsageError if it does not."""
    ends = time.monotonic() + limit_s
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            if time.monotonic() >= ends:
                raise UsageError(
                    Code.NO_MEETING_POINT,
                    f"expected the name of the job's first node, {host!r}, to have an address on "
                    f"{socket.gethostname()}, found none ({error.strerror}); pass --rdzv-endpoint HOST:PORT with an "
                    "address that every node can reach, the same on every node",
                ) from error
        time.sleep(1)


def fill_in(
    args: argparse.Namespace, given: set[str], job: SchedulerFacts | None, count_gpus: Callable[[], int]
) -> bool:
    """Complete the options of torchrun. Returns whether the nodes meet at the job's own head.

    `count_gpus` is asked for this node's GPUs only where the job does not tell. Raises UsageError, in one sentence,
    when something is missing that nobody has said.
    """
    if job is None:
        return False
    if "nproc_per_node" not in given:
        if job.nproc is not None:
            args.nproc_per_node = job.nproc
        elif job.scheduler is not None and (gpus := count_gpus()) > 0:
            args.nproc_per_node = str(gpus)
    if args.standalone:
        return False
    if "nnodes" not in given:
        _fill_nodes(args, job)
    if "rdzv_id" not in given and job.rdzv_id is not None:
        args.rdzv_id = job.rdzv_id
    if parse_nnodes(args.nnodes)[1] > 1:
        return _fill_meeting_point(args, given, job)
    if job.scheduler is not None and not given & {"rdzv_backend", "rdzv_endpoint", "master_addr", "master_port"}:
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"  # any free port: a node may have several jobs
    return False


def _fill_nodes(args: argparse.Namespace, job: SchedulerFacts) -> None:
    if job.nodes is None:
        if job.scheduler is not None:
            raise UsageError(
                Code.NODE_UNCLEAR,
                f"this is {job.name}, but its number of nodes is unknown; pass {variables(job, 'nodes')} "
                "on into the container, or pass --nnodes N",
            )
        return
    most = job.nodes[1]
    if job.tasks_per_node > 1:
        raise UsageError(
            Code.NODE_UNCLEAR,
            f"expected one task on each node, which starts the ranks of all its GPUs, found {job.tasks_per_node} tasks "
            f"on a node in {job.name}; start it with: {_on_each(job, most)} gpuwatch ...",
        )
    if most > 1 and not job.in_step:
        raise UsageError(
            Code.NODE_UNCLEAR,
            f"{job.name} has {most} nodes, and this runs on one of them only; to run on all: {_on_each(job, most)} "
            "gpuwatch ...; on this one alone: --nnodes 1",
        )
    args.nnodes = job.nnodes


def _on_each(job: SchedulerFacts, number: int) -> str:
    return job.scheduler.on_each_node.replace("{nodes}", str(number)) if job.scheduler is not None else ""


def _fill_meeting_point(args: argparse.Namespace, given: set[str], job: SchedulerFacts) -> bool:
    # what means torchrun's static rendezvous, which is its default
    is_static = given & {"master_addr", "master_port"} or (
        "rdzv_endpoint" in given and (job.scheduler is None or "node_rank" in given)
    )
    if "rdzv_backend" not in given and not is_static:
        args.rdzv_backend = "c10d"
    if args.rdzv_backend == "static" and "node_rank" not in given and job.node_rank is not None:
        args.node_rank = job.node_rank
    if "rdzv_endpoint" in given or args.rdzv_backend not in ("c10d", "static"):
        return False
    ours = "master_addr" not in given
    host = job.head if ours else args.master_addr
    there = args.master_port if "master_port" in given else job.port
    if not host:
        names = variables(job, "hosts" if job.scheduler is not None else "head")
        raise UsageError(
            Code.NO_MEETING_POINT,
            f"{args.nnodes} nodes need a meeting point: expected {names} in the environment, found none; "
            "or pass --rdzv-endpoint HEAD_HOST:PORT, the same on every node",
        )
    if args.rdzv_backend == "static":
        args.master_addr, args.master_port = host, there if there is not None else args.master_port
    else:
        args.rdzv_endpoint = f"{bracketed(host)}:{there if there is not None else C10D_DEFAULT_PORT}"
    if ours:
        _fill_this_node(args, given, job)
    return ours


def _fill_this_node(args: argparse.Namespace, given: set[str], job: SchedulerFacts) -> None:
    """Whether this node hosts the rendezvous, and by which name the others reach it."""
    node_rank = args.node_rank if "node_rank" in given else job.node_rank
    most = parse_nnodes(args.nnodes)[1]
    if node_rank is None and job.scheduler is not None:
        raise UsageError(
            Code.NODE_UNCLEAR,
            f"this is {job.name} of {most} nodes, but the rank of this node is unknown; pass "
            f"{variables(job, 'node_rank')} on into the container, or pass --node-rank N",
        )
    if node_rank is not None and not 0 <= node_rank < most:
        raise UsageError(
            Code.NODE_UNCLEAR,
            f"the rank of this node: expected 0 to {most - 1} with {most} nodes, found {node_rank}; pass --nnodes or "
            f"--node-rank, or correct {variables(job, 'nodes')} or {variables(job, 'node_rank')}",
        )
    if args.rdzv_backend == "c10d" and node_rank is not None:
        # torchrun would compare names and addresses, and dies on a node that does not know its own
        add_rendezvous_conf(args, "is_host", str(int(node_rank == 0)))
    if "local_addr" not in given and job.node is not None:
        args.local_addr = job.node  # else the host's own name for itself, which can be localhost
