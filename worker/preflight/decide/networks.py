"""Do the nodes share a network, and do the settings name interfaces that exist?"""

from __future__ import annotations

import ipaddress

from ....core.preflight import Finding, Grade, InventoryFacts
from .majority import Facts, finding, have, place_text

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def no_common_network(facts: Facts) -> list[Finding]:
    """A warning about nodes outside the network that most nodes share. It is no failure: networks may be routed."""
    first = {known.node: rank for rank, known in sorted(facts.items(), reverse=True)}
    networks = {node: _networks(facts[rank]) for node, rank in first.items()}
    _forget_private_bridges(networks, {node: facts[rank].boot_id or facts[rank].host for node, rank in first.items()})
    if len(first) < 2 or not all(networks.values()):
        return []  # one node has no known network, so nothing can be said about the others
    members: dict[Network, list[int]] = {}
    for node in sorted(networks):
        for network in networks[node]:
            members.setdefault(network, []).append(node)
    best, together = max(members.items(), key=lambda item: len(item[1]))
    outside = [rank for rank in sorted(facts) if facts[rank].node not in together]
    if not outside:
        return []
    next_step = (
        "If packets are routed between them, all is well; if not, name an interface that reaches the others: "
        "NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
    )
    if len(together) == 1:
        sentence = f"no two of the {len(first)} nodes have an address in the same network"
        return [finding("warn", "job", sorted(facts), facts, sentence, next_step)]
    inside = [rank for rank in sorted(facts) if facts[rank].node in together]
    sentence = (
        f"{place_text(outside, facts)} {have(outside)} no address in {best}, where {place_text(inside, facts)} "
        f"{have(inside)} one"
    )
    return [finding("warn", "node", outside, facts, sentence, next_step)]


def _networks(known: InventoryFacts) -> dict[Network, set[str]]:
    """network -> this node's addresses in it. No loopback, no link-local address, no network of a single address."""
    found: dict[Network, set[str]] = {}
    for written in (address for addresses in known.interfaces.values() for address in addresses):
        interface = ipaddress.ip_interface(written)
        alone = interface.network.prefixlen == interface.network.max_prefixlen
        if not (interface.is_loopback or interface.is_link_local or alone):
            found.setdefault(interface.network, set()).add(str(interface.ip))
    return found


def _forget_private_bridges(networks: dict[int, dict[Network, set[str]]], machine: dict[int, str]) -> None:
    """Remove networks whose addresses are on two machines: local bridges (docker0 is 172.17.0.1 everywhere)."""
    machines: dict[str, set[str]] = {}
    for node, of_node in networks.items():
        for addresses in of_node.values():
            for address in addresses:
                machines.setdefault(address, set()).add(machine[node])
    for of_node in networks.values():
        for network in list(of_node):
            if all(len(machines[address]) > 1 for address in of_node[network]):
                del of_node[network]


def interfaces_named(facts: Facts) -> list[Finding]:
    """Settings that name only interfaces that the rank's host lacks, so that the backend cannot start."""
    found: list[Finding] = []
    for setting, backend, matches in (
        ("NCCL_SOCKET_IFNAME", "cuda", nccl_matches),
        ("GLOO_SOCKET_IFNAME", "cpu", gloo_matches),
    ):
        wrong: dict[str, list[int]] = {}
        for rank in sorted(facts):
            value, interfaces = facts[rank].environment.get(setting, ""), usable_interfaces(facts[rank])
            if value and interfaces and not any(matches(value, name) for name in interfaces):
                wrong.setdefault(value, []).append(rank)
        for value, ranks in wrong.items():
            has = ", ".join(usable_interfaces(facts[ranks[0]]))
            used = any(facts[rank].device.startswith(backend) for rank in ranks)
            grade: Grade = "fail" if used else "warn"
            sentence = f"{setting}={value} names no interface of {place_text(ranks, facts)}; there are: {has}"
            found.append(finding(grade, "node", ranks, facts, sentence, f"Set {setting} to one of these, or unset it"))
    return found


def usable_interfaces(known: InventoryFacts) -> list[str]:
    """Names of the interfaces with an address. NCCL and gloo use no others."""
    return sorted(name for name, addresses in known.interfaces.items() if addresses)


def nccl_matches(setting: str, name: str) -> bool:
    """NCCL's rule: a list of prefixes. `=` means the whole name, `^` all other interfaces.

    >>> nccl_matches("eth,ib", "ib0"), nccl_matches("=eth0", "eth01"), nccl_matches("^docker", "eth0")
    (True, False, True)
    """
    excluded = setting.startswith("^")
    rest = setting[excluded:]
    whole = rest.startswith("=")
    listed = [word for word in rest[whole:].split(",") if word]
    hit = any(name == word if whole else name.startswith(word) for word in listed)
    return hit != excluded


def gloo_matches(setting: str, name: str) -> bool:
    """torch's rule for gloo: a list of whole names."""
    return name in setting.split(",")
