"""Where the collector of a `gpuwatch run` is and who hosts it: from the options, and from what the environment says."""

from __future__ import annotations

import argparse

from ...core.errors import UsageError
from ...core.host import host_name, loopback
from ..arguments.plan import C10D_DEFAULT_PORT, Plan, bracketed, make_plan, split_endpoint
from ..scheduler.job import Job

_LAST_PORT = 65535


def run_plan(args: argparse.Namespace, job: Job | None) -> Plan:
    """Completes `args` with what torchrun's parser would have of them. Raises UsageError where something is missing."""
    nnodes = args.nnodes if args.nnodes is not None else _nodes(job)
    node_rank = args.node_rank if args.node_rank is not None else job.node_rank if job is not None else None
    args.nnodes = nnodes
    args.node_rank = node_rank or 0
    args.standalone = nnodes == "1"
    args.rdzv_id = job.rdzv_id if job is not None and job.rdzv_id is not None else "none"
    args.rdzv_backend, args.rdzv_conf, args.rdzv_endpoint = "static", "", ""
    args.master_addr, args.master_port = "127.0.0.1", None
    if not args.standalone and args.collector is None:
        args.rdzv_endpoint = _head(args, job)
        if node_rank is None:
            raise UsageError(f"{nnodes} nodes, and nothing says which of them this is; pass --node-rank N")
    return make_plan(args, lambda host: False, loopback())


def meeting_place(args: argparse.Namespace, plan: Plan, collector: str) -> str:
    """HOST:PORT where the ranks meet for their preflight: the port next to the collector's; "" if all are of one host.

    `collector` is its address. The host is for ranks that the script does not tell where rank 0 is.
    """
    if plan.max_nodes == 1:
        return ""
    named, _, port = collector.removeprefix("tcp://").rpartition(":")
    meets = args.head or args.rdzv_endpoint
    host = split_endpoint(meets, C10D_DEFAULT_PORT)[0] if meets else host_name() if plan.local else named.strip("[]")
    return f"{bracketed(host)}:{int(port) + 1 if int(port) < _LAST_PORT else int(port) - 1}"


def _nodes(job: Job | None) -> str:
    """One for each `gpuwatch run` that a scheduler starts on a node; else this one alone."""
    if job is None or job.nodes is None or not job.in_step:
        return "1"
    least, most = job.nodes
    return str(most) if least == most else f"{least}:{most}"


def _head(args: argparse.Namespace, job: Job | None) -> str:
    if args.head is not None:
        host, port = split_endpoint(args.head, C10D_DEFAULT_PORT)
        return f"{bracketed(host)}:{port}"
    if job is None or not job.head:
        raise UsageError(f"{args.nnodes} nodes need a place to meet: pass --head HOST[:PORT], the same on every node")
    return f"{bracketed(job.head)}:{job.port if job.port is not None else C10D_DEFAULT_PORT}"
