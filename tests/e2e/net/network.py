"""Nodes on one machine, each with an address and a host name of its own: network namespaces, joined by a bridge.

    node-0 eth0 10.213.78.1 --- port0 \
    node-1 eth0 10.213.78.2 --- port1 - bridge (in a namespace of its own: no rule of this machine's firewall sees it)
    node-2 eth0 10.213.78.3 --- port2 /

The nodes share files, processes and memory: only their networks and names are apart. Everything hangs on named
namespaces, `NAME-switch` and `NAME-0` ...: whoever knows the name can take it down, also after a crash of the one who
brought it up.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

PREFIX = "gpuwatch"
_NAMESPACES = Path("/run/netns")
_NEEDS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "unshare": "util-linux", "mount": "mount"}


def why_not() -> str:
    """Why there can be no such network here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [f"{tool} (package {package})" for tool, package in _NEEDS.items() if shutil.which(tool) is None]:
        return f"not installed: {', '.join(lacking)}"
    probe = "ip link add type bridge && ip link add v0 type veth peer name v1 && nft add table bridge probe"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "sh", "-c", probe], capture_output=True, text=True)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


def can_delay() -> bool:
    """Whether this kernel has netem: some have only what limits a rate."""
    probe = "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root netem delay 1ms"
    return subprocess.run(["unshare", "--net", "sh", "-c", probe], capture_output=True).returncode == 0


@dataclass(frozen=True)
class Node:
    """One node, from outside."""

    number: int
    namespace: str
    hosts_file: Path

    @property
    def host(self) -> str:
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        return f"10.213.78.{self.number + 1}"

    def inside(self, command: list[str]) -> list[str]:
        """The command line that runs `command` in this node, as the very process that is started."""
        enter = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
        own_names = ["unshare", "--uts", "--mount", "sh", "-c", enter, "sh", self.host, str(self.hosts_file)]
        return ["ip", "netns", "exec", self.namespace, *own_names, *command]

    def pids(self) -> list[int]:
        """Process ids of everything that runs in it."""
        return [int(pid) for pid in _run(f"ip netns pids {self.namespace}").split()]


class Network:
    """Nodes that reach each other, until a fault is put in."""

    def __init__(self, name: str, count: int, folder: Path) -> None:
        self.name = name
        self._switch = f"{name}-switch"
        hosts = folder / f"{name}.hosts"
        self.nodes = [Node(number, f"{name}-{number}", hosts) for number in range(count)]
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{node.address} {node.host}\n" for node in self.nodes))

    def up(self) -> None:
        """Bring up the nodes that are not up yet."""
        there = _namespaces(self.name)
        if self._switch not in there:
            _run(f"ip netns add {self._switch}")
            self._at_switch("ip link add bridge type bridge")
            self._at_switch("ip link set bridge up")
        for node in self.nodes:
            if node.namespace in there:
                continue
            port = _port(node)
            _run(f"ip netns add {node.namespace}")
            self._at_switch(f"ip link add {port} type veth peer name eth0 netns {node.namespace}")
            self._at_switch(f"ip link set {port} master bridge up")
            _at(node.namespace, "ip link set lo up")
            _at(node.namespace, f"ip address add {node.address}/24 dev eth0")
            _at(node.namespace, "ip link set eth0 up")

    def down(self) -> None:
        """Take down the network, with all that runs in it."""
        take_down(self.name)

    # -- faults ---------------------------------------------------------------------------------------------------

    def cut_off(self, node: Node) -> None:
        """Silently drop every packet between the node and all others."""
        self._lose(f"iifname {_port(node)}")
        self._lose(f"oifname {_port(node)}")

    def drop(self, a: Node, b: Node, but: str = "") -> None:
        """Silently drop every packet between these two, in both directions.

        `but` is a range of ports that a firewall lets pass, as `29400-29401`.
        """
        spared = f" tcp sport != {but} tcp dport != {but}" if but else ""
        self._lose(f"ip saddr {a.address} ip daddr {b.address}{spared}")
        self._lose(f"ip saddr {b.address} ip daddr {a.address}{spared}")

    def block(self, a: Node, b: Node, port: int) -> None:
        """Silently drop what these two send to this port of the other, or from it."""
        for source, target in ((a, b), (b, a)):
            for side in ("sport", "dport"):
                self._lose(f"ip saddr {source.address} ip daddr {target.address} tcp {side} {port}")

    def slow(self, a: Node, b: Node, rate: str = "1gbit", delay: str = "") -> None:
        """Between these two, packets pass at this rate at most and, where the kernel can, later by `delay`."""
        for source, target in ((a, b), (b, a)):
            if not _is_shaped(source):
                _at(source.namespace, "tc qdisc add dev eth0 root handle 1: htb")
            way = f"1:{target.number + 1:x}"
            commands = [
                f"class replace dev eth0 parent 1: classid {way} htb rate {rate} quantum 60000",
                f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {target.address} flowid {way}",
            ]
            if delay:
                commands.append(f"qdisc replace dev eth0 parent {way} netem delay {delay}")
            for command in commands:
                _at(source.namespace, f"tc {command}")

    def restore(self) -> None:
        """Take all faults back."""
        self._at_switch("nft flush ruleset")
        for node in self.nodes:
            if _is_shaped(node):
                _at(node.namespace, "tc qdisc delete dev eth0 root")
            _at(node.namespace, "ip neighbour flush dev eth0")  # nobody is remembered as out of reach

    def _lose(self, which: str) -> None:
        self._at_switch("nft add table bridge faults")
        self._at_switch("nft add chain bridge faults lost { type filter hook forward priority 0; }")
        self._at_switch(f"nft add rule bridge faults lost {which} drop")

    def _at_switch(self, command: str) -> str:
        return _at(self._switch, command)


def take_down(name: str) -> None:
    """By name alone; there need be nothing of that name, and another process may take it down at the same time."""
    for namespace in _namespaces(name):
        for pid in _tried(f"ip netns pids {namespace}").stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
        _tried(f"ip netns delete {namespace}")
        assert not (_NAMESPACES / namespace).exists(), namespace


def name_of_this_process() -> str:
    """For a network that nobody else brings up or takes down while this process lives."""
    return f"{PREFIX}-{os.getpid()}"


def take_down_stale() -> None:
    """What processes that are gone have left."""
    for namespace in _namespaces(PREFIX):
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-\w+", namespace)
        if owner and not Path("/proc", owner[1]).exists():
            take_down(f"{PREFIX}-{owner[1]}")


def _namespaces(name: str) -> list[str]:
    return sorted(path.name for path in _NAMESPACES.glob(f"{name}-*"))


def _is_shaped(node: Node) -> bool:
    return "htb" in _at(node.namespace, "tc qdisc show dev eth0")


def _port(node: Node) -> str:
    return f"port{node.number}"


def _at(namespace: str, command: str) -> str:
    return _run(f"ip netns exec {namespace} {command}")


def _tried(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command.split(), capture_output=True, text=True)


def _run(command: str) -> str:
    done = _tried(command)
    assert done.returncode == 0, f"{command}: {done.stderr.strip()}"
    return done.stdout
