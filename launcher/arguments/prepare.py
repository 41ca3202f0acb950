"""What is found out before a launch starts anything: what is wrong in its options and its ranks."""

from __future__ import annotations

import argparse
import os
import socket
import time
from pathlib import Path

from ...core.errors import UsageError
from ..say import say
from ..scheduler.cluster import read_job
from ..scheduler.fill_in import fill_in, given_options
from ..scheduler.job import Job
from .plan import is_number, parse_nnodes

_NAME_WAIT_S = 30.0
"""A node that was started for this job may be in the name service some seconds later."""


def fill_in_from_job(args: argparse.Namespace, parser: argparse.ArgumentParser, arguments: list[str]) -> Job | None:
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


def expect_script(args: argparse.Namespace) -> None:
    """What torchrun would only find out later, said in one sentence."""
    if args.no_python and args.module:
        raise UsageError("expected one of --no-python and -m/--module, found both; drop one of them")
    if not args.module and not args.no_python and not Path(args.training_script).exists():
        raise UsageError(f"expected a script to run, found no file {args.training_script!r} in {Path.cwd()}")


def _local_world_size(text: str) -> int:
    if is_number(text):
        return int(text)
    from torch.distributed.run import determine_local_world_size  # it counts GPUs

    return int(determine_local_world_size(text))


def number_of_ranks(args: argparse.Namespace) -> int:
    """Of this node."""
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts: expected 0 or more, found {args.max_restarts}")
    try:
        nproc = _local_world_size(str(args.nproc_per_node))
    except ValueError as error:
        raise UsageError(
            f"--nproc-per-node: expected a number, cpu, gpu or auto, found {args.nproc_per_node!r} ({error})"
        ) from error
    if nproc < 1:
        raise UsageError(f"--nproc-per-node: expected 1 or more, found {nproc}")
    return nproc
