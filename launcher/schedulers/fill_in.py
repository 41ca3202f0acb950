"""What the user of a launch inside a job need not say: filled in from the job, and never in place of what was said."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Mapping

from ...core.errors import UsageError
from ..option_types import bracketed, parse_nnodes
from ..plan import C10D_DEFAULT_PORT, add_rendezvous_conf
from ..say import say
from .environment import read_job, variables
from .job import SchedulerFacts

_NAME_WAIT_S = 30.0
"""A node that was started for this job may be in the name service some seconds later."""


def fill_in_from_job(
    args: argparse.Namespace, parser: argparse.ArgumentParser, arguments: list[str]
) -> SchedulerFacts | None:
    """Complete the options from the job that this launch is part of, and say what came out. Returns the job, if any.

    `parser` is of no use afterwards, see `given_options`.
    """
    job = read_job(os.environ)
    if job is None:
        return None
    meets_there = fill_in(args, given_options(parser, arguments, os.environ), job, _count_gpus)
    if job.scheduler is not None and meets_there:
        assert job.head is not None
        if job.node_rank == 0:
            nodes = parse_nnodes(args.nnodes)[1]
            say(f"{job.name}: {nodes} nodes meet at {args.rdzv_endpoint or job.head}")
        expect_address(job.head, _NAME_WAIT_S)
    return job


def _count_gpus() -> int:
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
                    f"expected the name of the job's first node, {host!r}, to have an address on "
                    f"{socket.gethostname()}, found none ({error.strerror}); pass --rdzv-endpoint HOST:PORT with an "
                    "address that every node can reach, the same on every node"
                ) from error
        time.sleep(1)


def given_options(parser: argparse.ArgumentParser, arguments: list[str], environ: Mapping[str, str]) -> set[str]:
    """What was said: on the command line, or in torchrun's own variables (PET_NNODES for --nnodes).

    The parser is of no use afterwards: it has lost its defaults.
    """
    dests = {action.dest for action in parser._actions}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    parser._defaults.clear()
    said = set(vars(parser.parse_known_args(arguments)[0]))
    return said | {dest for dest in dests if f"PET_{dest.upper()}" in environ}


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
        _fill_processes(args, job, count_gpus)
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


def _fill_processes(args: argparse.Namespace, job: SchedulerFacts, count_gpus: Callable[[], int]) -> None:
    if job.nproc is not None:
        args.nproc_per_node = job.nproc
    elif job.scheduler is not None and (gpus := count_gpus()) > 0:
        args.nproc_per_node = str(gpus)


def _fill_nodes(args: argparse.Namespace, job: SchedulerFacts) -> None:
    if job.nodes is None:
        if job.scheduler is not None:
            raise UsageError(
                f"this is {job.name}, and nothing says of how many nodes; hand {variables(job, 'nodes')} "
                "on into the container, or pass --nnodes N"
            )
        return
    least, most = job.nodes
    if job.tasks_per_node > 1:
        raise UsageError(
            f"expected one task on each node, which starts the ranks of all its GPUs, found {job.tasks_per_node} tasks "
            f"on a node in {job.name}; start it with: {_on_each(job, most)} gpuwatch ..."
        )
    if most > 1 and not job.in_step:
        raise UsageError(
            f"{job.name} has {most} nodes, and this runs on one of them only; to run on all: {_on_each(job, most)} "
            "gpuwatch ...; on this one alone: --nnodes 1"
        )
    args.nnodes = str(most) if least == most else f"{least}:{most}"


def _on_each(job: SchedulerFacts, nodes: int) -> str:
    return job.scheduler.on_each_node.replace("{nodes}", str(nodes)) if job.scheduler is not None else ""


def _fill_meeting_point(args: argparse.Namespace, given: set[str], job: SchedulerFacts) -> bool:
    if "rdzv_backend" not in given and not _means_static(given, job):
        args.rdzv_backend = "c10d"
    if args.rdzv_backend == "static" and "node_rank" not in given and job.node_rank is not None:
        args.node_rank = job.node_rank
    if "rdzv_endpoint" in given or args.rdzv_backend not in ("c10d", "static"):
        return False
    ours = "master_addr" not in given
    host = job.head if ours else args.master_addr
    port = args.master_port if "master_port" in given else job.port
    if not host:
        names = variables(job, "hosts" if job.scheduler is not None else "head")
        raise UsageError(
            f"{args.nnodes} nodes need a meeting point: expected {names} in the environment, found none; "
            "or pass --rdzv-endpoint HEAD_HOST:PORT, the same on every node"
        )
    if args.rdzv_backend == "static":
        args.master_addr, args.master_port = host, port if port is not None else args.master_port
    else:
        args.rdzv_endpoint = f"{bracketed(host)}:{port if port is not None else C10D_DEFAULT_PORT}"
    if ours:
        _fill_this_node(args, given, job)
    return ours


def _means_static(given: set[str], job: SchedulerFacts) -> bool:
    """Options that speak of torchrun's static rendezvous, which is its default."""
    if given & {"master_addr", "master_port"}:
        return True
    return "rdzv_endpoint" in given and (job.scheduler is None or "node_rank" in given)


def _fill_this_node(args: argparse.Namespace, given: set[str], job: SchedulerFacts) -> None:
    """Whether this node hosts the rendezvous, and by which name the others reach it."""
    node_rank = args.node_rank if "node_rank" in given else job.node_rank
    most = parse_nnodes(args.nnodes)[1]
    if node_rank is None and job.scheduler is not None:
        raise UsageError(
            f"this is {job.name} of {most} nodes, and nothing says which of them this is; hand "
            f"{variables(job, 'node_rank')} on into the container, or pass --node-rank N"
        )
    if node_rank is not None and not 0 <= node_rank < most:
        raise UsageError(
            f"the rank of this node: expected 0 to {most - 1} with {most} nodes, found {node_rank}; pass --nnodes or "
            f"--node-rank, or mend {variables(job, 'nodes')} or {variables(job, 'node_rank')}"
        )
    if args.rdzv_backend == "c10d" and node_rank is not None:
        # torchrun would compare names and addresses, and dies on a node that does not know its own
        add_rendezvous_conf(args, "is_host", str(int(node_rank == 0)))
    if "local_addr" not in given and job.node is not None:
        args.local_addr = job.node  # else the host's own name for itself, which can be localhost
