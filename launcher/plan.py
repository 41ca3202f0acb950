"""Where the collector of a job is and who hosts it: decided from the options alone, no socket is opened."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

from ..core.codes import Code, coded
from ..core.errors import UsageError
from ..core.guest.tell import say
from ..core.host import host_name, loopback
from ..core.wire.keys import SECRET_VARIABLE, JobKeys, derive_keys, others_may_read, random_secret, read_secret
from .option_types import bracketed, is_number, parse_nnodes
from .scheduler_job import SchedulerFacts

C10D_DEFAULT_PORT = 29400
STATIC_DEFAULT_PORT = 29500

_OF_THE_COLLECTOR = {
    "collector_port": "drop --collector-port",
    "metrics_port": "it is the collector that serves metrics: gpuwatch collect --metrics-port [HOST:]PORT",
    "notify": "it is the collector that notifies: gpuwatch collect --notify URL|COMMAND",
}
"""Options of a launch that starts the collector, and what to do instead where another host runs it."""


@dataclass(frozen=True)
class CollectorPlan:
    """How this launch meets its collector."""

    min_nodes: int
    max_nodes: int
    hosts: bool
    """This node starts the collector."""
    may_join: bool
    """If the port is taken, it may be by the collector of this very job (two nodes on one host)."""
    bind: str
    """What the collector binds, if this node starts it."""
    connect: str
    """Where the node agent connects; "" until the collector has said which port it got."""
    job: str
    """What the keys are salted with: the same on all nodes."""
    local: bool
    """Nobody outside this launch takes part: keys are made afresh and the port is any free one."""
    starts_all: bool = False
    """What this node starts brings other hosts in."""


def make_plan(
    args: argparse.Namespace, is_this_host: Callable[[str], bool], loopback: str = "127.0.0.1"
) -> CollectorPlan:
    """Decide from parsed options. `is_this_host` says whether a host name or address is of this host.

    `loopback` is the address at which this host reaches itself.

    Raises UsageError when several nodes have nothing to meet at.
    """
    min_nodes, max_nodes = parse_nnodes(args.nnodes)
    job = str(args.rdzv_id)
    if args.collector is not None:
        for name, hint in _OF_THE_COLLECTOR.items():
            if getattr(args, name) not in (None, []):
                option = f"--{name.replace('_', '-')}"
                raise UsageError(Code.WRONG_TOGETHER, f"expected one of --collector and {option}, found both; {hint}")
        return CollectorPlan(min_nodes, max_nodes, False, False, "", args.collector, job, False)
    if max_nodes == 1 or args.standalone:
        port = str(args.collector_port) if args.collector_port is not None else "*"
        return CollectorPlan(min_nodes, max_nodes, True, False, f"tcp://{bracketed(loopback)}:{port}", "", job, True)
    host, rdzv_port = _meeting_point(args, max_nodes)
    port_number = args.collector_port if args.collector_port is not None else rdzv_port + 1
    if port_number > 65535:
        raise UsageError(
            Code.NO_MEETING_POINT,
            f"the rendezvous port is {rdzv_port}, so its next cannot be the collector's; pass --collector-port",
        )
    hosts = _is_head(args, host, is_this_host)
    connect = f"tcp://{bracketed(loopback if hosts else host)}:{port_number}"
    return CollectorPlan(min_nodes, max_nodes, hosts, hosts, f"tcp://*:{port_number}", connect, job, False)


def limit_rendezvous(args: argparse.Namespace) -> None:
    """Have torchrun wait for a missing node as long as the preflight would for its ranks, unless the user said."""
    name = {"c10d": "join_timeout", "static": "timeout"}.get(args.rdzv_backend)
    if name is not None:
        add_rendezvous_conf(args, name, str(math.ceil(args.preflight_timeout)))


def add_rendezvous_conf(args: argparse.Namespace, name: str, value: str) -> None:
    """Put `name=value` into --rdzv-conf, unless the user has said otherwise there."""
    said = {item.partition("=")[0].strip() for item in (args.rdzv_conf or "").split(",")}
    if name not in said:
        args.rdzv_conf = f"{args.rdzv_conf},{name}={value}" if args.rdzv_conf else f"{name}={value}"


def _meeting_point(args: argparse.Namespace, max_nodes: int) -> tuple[str, int]:
    if args.rdzv_endpoint:
        host, port = split_endpoint(
            args.rdzv_endpoint, STATIC_DEFAULT_PORT if args.rdzv_backend == "static" else C10D_DEFAULT_PORT
        )
        if port == 0:
            raise UsageError(
                Code.NO_MEETING_POINT,
                f"--rdzv-endpoint {args.rdzv_endpoint}: port 0 is for one node, {max_nodes} nodes need a fixed port, "
                f"such as {host}:{C10D_DEFAULT_PORT}",
            )
        return host, port
    # older releases of torchrun have 29500 where newer have None
    names_a_master = args.master_addr != "127.0.0.1" or args.master_port not in (None, STATIC_DEFAULT_PORT)
    if args.rdzv_backend == "static" and names_a_master:
        return args.master_addr, args.master_port or STATIC_DEFAULT_PORT
    raise UsageError(
        Code.NO_MEETING_POINT,
        f"--nnodes {args.nnodes} needs a meeting point: pass --rdzv-backend c10d --rdzv-endpoint HEAD_HOST:PORT, "
        "the same on every node",
    )


def _is_head(args: argparse.Namespace, host: str, is_this_host: Callable[[str], bool]) -> bool:
    """As torchrun decides who hosts the rendezvous: node rank 0, `is_host` in --rdzv-conf, else the host's name."""
    if args.rdzv_backend == "static":
        return int(args.node_rank) == 0
    for item in (args.rdzv_conf or "").split(","):
        key, _, value = item.partition("=")
        if key.strip() == "is_host":
            return value.strip().lower() in ("1", "true", "t", "yes", "y")
    return is_this_host(host)


def split_endpoint(endpoint: str, default_port: int) -> tuple[str, int]:
    """`host`, `host:port` or `[v6]:port`. Raises UsageError on a port that is none."""
    if endpoint.startswith("[") and "]" in endpoint:
        host, _, rest = endpoint[1:].partition("]")
        if rest and not rest.startswith(":"):
            raise UsageError(Code.WRONG_VALUE, f"--rdzv-endpoint: expected HOST:PORT, found {endpoint!r}")
        port = rest.removeprefix(":")
    elif endpoint.count(":") == 1:
        host, _, port = endpoint.partition(":")
    else:
        host, port = endpoint, ""
    if (port and (not is_number(port) or int(port) > 65535)) or not host:
        raise UsageError(Code.WRONG_VALUE, f"--rdzv-endpoint: expected HOST:PORT, found {endpoint!r}")
    return host, int(port) if port else default_port


# The keys of a job's encryption.


def job_keys(args: argparse.Namespace, plan: CollectorPlan) -> JobKeys:
    """From the job's secret; without one, made for this launch, or from what all nodes know."""
    secret = job_secret(args.secret_file, plan.job, local=plan.local)
    os.environ.pop(SECRET_VARIABLE, None)  # no rank needs it, nor what a rank starts
    return derive_keys(secret, plan.job)


def job_secret(secret_file: str | None, job: str, *, local: bool) -> str:
    """As the user has it. Without one, what all nodes know, or a random one if nobody outside takes part (`local`)."""
    secret = read_secret(secret_file)
    if sentence := others_may_read(secret_file):
        say(coded(sentence, Code.KEYS_GUESSABLE))
    if secret is not None:
        return secret
    if local:
        return random_secret()
    text = (
        f"encrypting with keys derived from the rendezvous id {job!r}; to keep others on this network out, give every "
        "node the same GPUWATCH_SECRET or --secret-file"
    )
    say(coded(text, Code.KEYS_GUESSABLE))
    return f"rendezvous id {job}"


# Where the collector of a `gpuwatch run` is and who hosts it: from the options, and from what the environment says.

_LAST_PORT = 65535


def run_plan(args: argparse.Namespace, job: SchedulerFacts | None) -> CollectorPlan:
    """Completes `args` with what torchrun's parser would have of them. Raises UsageError where something is missing."""
    # one node for each `gpuwatch run` that a scheduler starts; else this one alone
    of_job = job.nnodes if job is not None and job.in_step else None
    nnodes = args.nnodes if args.nnodes is not None else of_job or "1"
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
            raise UsageError(
                Code.NODE_UNCLEAR, f"{nnodes} nodes, but the rank of this node is unknown; pass --node-rank N"
            )
    return make_plan(args, lambda host: False, loopback())


def meeting_place(args: argparse.Namespace, plan: CollectorPlan, collector: str) -> str:
    """HOST:PORT where the ranks meet for their preflight: the port next to the collector's; "" if all are of one host.

    `collector` is its address. The host is for ranks that the script does not tell where rank 0 is.
    """
    if plan.max_nodes == 1:
        return ""
    named, _, port = collector.removeprefix("tcp://").rpartition(":")
    meets = args.head or args.rdzv_endpoint
    host = split_endpoint(meets, C10D_DEFAULT_PORT)[0] if meets else host_name() if plan.local else named.strip("[]")
    return f"{bracketed(host)}:{int(port) + 1 if int(port) < _LAST_PORT else int(port) - 1}"


def _head(args: argparse.Namespace, job: SchedulerFacts | None) -> str:
    if args.head is not None:
        host, port = split_endpoint(args.head, C10D_DEFAULT_PORT)
        return f"{bracketed(host)}:{port}"
    if job is None or not job.head:
        raise UsageError(
            Code.NO_MEETING_POINT,
            f"{args.nnodes} nodes need a meeting point: pass --head HOST[:PORT], the same on every node",
        )
    return f"{bracketed(job.head)}:{job.port if job.port is not None else C10D_DEFAULT_PORT}"
