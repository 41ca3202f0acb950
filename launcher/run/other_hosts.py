"""`gpuwatch run --other-hosts`: a run of one host that others may join, once the command has brought them in."""

from __future__ import annotations

import argparse
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from ...core.errors import UsageError
from ...core.host import host_name
from ...core.settings import WorkerSettings
from ...core.wire.join import Join, write_join
from ...core.wire.pipe import AgentConfig
from ..arguments.plan import Plan, bracketed, split_endpoint

_MOST_HOSTS = 100_000
_LINK_LOCAL = ("169.254.", "fe80:")


def open_plan(args: argparse.Namespace, plan: Plan) -> Plan:
    """The same, with a collector that listens on every address. Raises UsageError where it is not this run's alone."""
    if not plan.local:
        raise UsageError(
            "--other-hosts: expected one gpuwatch run that has the collector, found --nnodes or --collector; "
            "leave out --other-hosts, and start gpuwatch run on each host"
        )
    port = str(args.collector_port) if args.collector_port is not None else "*"
    return replace(plan, max_nodes=_MOST_HOSTS, bind=f"tcp://*:{port}", starts_all=True)


def open_run(
    args: argparse.Namespace, folder: Path, address: str, agent: AgentConfig, settings: WorkerSettings, meeting_key: str
) -> Path:
    """Write the file by which others join. `address` is what the collector has bound. Raises OSError."""
    port = address.rpartition(":")[2]
    hosts = [split_endpoint(args.head, 0)[0]] if args.head is not None else [host_name(), *_addresses()]
    return write_join(folder, Join([f"tcp://{bracketed(host)}:{port}" for host in hosts], agent, settings, meeting_key))


def close_run(join: Path) -> None:
    """Nobody joins any more."""
    with suppress(OSError):
        join.unlink()


def _addresses() -> list[str]:
    """This host's, as others may reach it: IPv4 first."""
    found: dict[socket.AddressFamily, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            of_family = found.get(entry.family)
            if of_family is not None and name != "lo" and not entry.address.startswith(_LINK_LOCAL):
                of_family.append(entry.address)
    return [address for addresses in found.values() for address in addresses]
