"""Where the collector of a job is and who hosts it: decided from the options alone, no socket is opened."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

from ...core.errors import UsageError

C10D_DEFAULT_PORT = 29400
STATIC_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Plan:
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


def make_plan(args: argparse.Namespace, is_this_host: Callable[[str], bool], loopback: str = "127.0.0.1") -> Plan:
    """Decide from parsed options. `is_this_host` says whether a host name or address is of this host.

    `loopback` is the address at which this host reaches itself.

    Raises UsageError when several nodes have nothing to meet at.
    """
    min_nodes, max_nodes = parse_nnodes(args.nnodes)
    several = max_nodes > 1 and not args.standalone
    job = str(args.rdzv_id)
    if args.collector is not None:
        if args.collector_port is not None:
            raise UsageError("expected one of --collector and --collector-port, found both; drop --collector-port")
        if args.metrics_port is not None:
            raise UsageError(
                "expected one of --collector and --metrics-port, found both; it is the collector that serves metrics: "
                "gpuwatch collect --metrics-port [HOST:]PORT"
            )
        return Plan(min_nodes, max_nodes, False, False, "", args.collector, job, False)
    if not several:
        port = str(args.collector_port) if args.collector_port is not None else "*"
        return Plan(min_nodes, max_nodes, True, False, f"tcp://{bracketed(loopback)}:{port}", "", job, True)
    host, rdzv_port = _meeting_point(args, max_nodes)
    port_number = args.collector_port if args.collector_port is not None else rdzv_port + 1
    if port_number > 65535:
        raise UsageError(
            f"the rendezvous port is {rdzv_port}, so its next cannot be the collector's; pass --collector-port"
        )
    hosts = _is_head(args, host, is_this_host)
    return Plan(
        min_nodes,
        max_nodes,
        hosts,
        hosts,
        f"tcp://*:{port_number}",
        f"tcp://{bracketed(loopback if hosts else host)}:{port_number}",
        job,
        False,
    )


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


def is_number(text: str) -> bool:
    """Whether it is written in the digits 0 to 9 alone: Python's isdigit() takes superscripts, too."""
    return text.isascii() and text.isdigit()


def parse_nnodes(text: str) -> tuple[int, int]:
    """`2` or `1:4` as (min, max). Raises UsageError on anything else."""
    parts = str(text).split(":")
    if len(parts) <= 2 and all(is_number(part) for part in parts):
        least, most = int(parts[0]), int(parts[-1])
        if 0 < least <= most:
            return least, most
    raise UsageError(f"--nnodes: expected a number of nodes or MIN:MAX, found {text!r}")


def _meeting_point(args: argparse.Namespace, max_nodes: int) -> tuple[str, int]:
    if args.rdzv_endpoint:
        host, port = split_endpoint(
            args.rdzv_endpoint, STATIC_DEFAULT_PORT if args.rdzv_backend == "static" else C10D_DEFAULT_PORT
        )
        if port == 0:
            raise UsageError(
                f"--rdzv-endpoint {args.rdzv_endpoint}: port 0 is for one node, {max_nodes} nodes need a fixed port, "
                f"such as {host}:{C10D_DEFAULT_PORT}"
            )
        return host, port
    if args.rdzv_backend == "static" and _names_a_master(args):
        return args.master_addr, args.master_port or STATIC_DEFAULT_PORT
    raise UsageError(
        f"--nnodes {args.nnodes} needs a meeting point: pass --rdzv-backend c10d --rdzv-endpoint HEAD_HOST:PORT, "
        "the same on every node"
    )


def _names_a_master(args: argparse.Namespace) -> bool:
    """Whether --master-addr or --master-port was given. Older releases of torchrun have 29500 where newer have None."""
    return args.master_addr != "127.0.0.1" or args.master_port not in (None, STATIC_DEFAULT_PORT)


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
            raise UsageError(f"--rdzv-endpoint: expected HOST:PORT, found {endpoint!r}")
        port = rest.removeprefix(":")
    elif endpoint.count(":") == 1:
        host, _, port = endpoint.partition(":")
    else:
        host, port = endpoint, ""
    if (port and (not is_number(port) or int(port) > 65535)) or not host:
        raise UsageError(f"--rdzv-endpoint: expected HOST:PORT, found {endpoint!r}")
    return host, int(port) if port else default_port


def bracketed(host: str) -> str:
    """A host as it stands before `:PORT`."""
    return f"[{host}]" if ":" in host else host
