"""Can each rank's host carry the job? Its limits, its networks and interfaces, and its GPUs. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sized

from ....core.codes import Code
from ....core.preflight import Grade, InventoryFacts, PreflightFinding, Subject
from ....core.text import ranks_text

Facts = Mapping[int, InventoryFacts]
"""Rank -> its inventory."""

_MOST_HOSTS = 3


def place_text(ranks: Iterable[int], facts: Facts) -> str:
    """`ranks 8-15 (node b)`, or `ranks 0-511 (64 nodes: a, b, c, ...)`."""
    ranks = sorted(ranks)
    hosts = hosts_of(ranks, facts)
    if not hosts:
        return ranks_text(ranks)
    if len(hosts) == 1:
        return f"{ranks_text(ranks)} (node {hosts[0]})"
    if len(hosts) <= _MOST_HOSTS:
        return f"{ranks_text(ranks)} (nodes {', '.join(hosts)})"
    return f"{ranks_text(ranks)} ({len(hosts)} nodes: {', '.join(hosts[:_MOST_HOSTS])}, ...)"


def hosts_of(ranks: Iterable[int], facts: Facts) -> list[str]:
    """The hosts of these ranks, each once, in the ranks' order."""
    return list(dict.fromkeys(facts[rank].host for rank in ranks if facts[rank].host))


def machine_of(known: InventoryFacts) -> str:
    """Distinguishes two machines, even of the same name."""
    return known.boot_id or known.host


def finding(
    code: Code,
    grade: Grade,
    subject: Subject,
    ranks: list[int],
    facts: Facts,
    sentence: str,
    next_step: str = "",
    device: str = "",
) -> PreflightFinding:
    """A finding of this stage about these ranks, in this order, and their hosts."""
    next_ = f"{next_step}." if next_step else ""
    return PreflightFinding(
        "consistency", grade, subject, ranks, hosts_of(ranks, facts), sentence, next_, device, code=code
    )


def have(ranks: Sized) -> str:
    """The verb for them."""
    return "has" if len(ranks) == 1 else "have"


# Limits of a host that a training job may hit later: shared memory, open files, locked memory.

SHM_BYTES = 1 << 30
"""NVIDIA's recommendation for a container (--shm-size=1g). Docker's default is 64 MiB."""
FILES = 512
"""For Python, torch, the pipes of a data loader, and NCCL within one node."""
FILES_PER_RANK = 16
"""Sockets to every other rank: gloo has one per group, NCCL up to 16 per connection on a fast network."""
MEMLOCK_BYTES = 1 << 30
"""InfiniBand locks its send buffers, hundreds of MB per rank. The defaults of distributions are 64 KiB or 8 MiB."""


def tight_limits(facts: Facts) -> list[PreflightFinding]:
    """Warnings about low limits. They are not failures, since the needs of a job are unknown beforehand."""
    files = FILES + FILES_PER_RANK * len(facts)
    found = _below(
        {rank: known.shm_free for rank, known in facts.items()},
        SHM_BYTES,
        facts,
        lambda least: f"only {_mib(least)} of /dev/shm free, where NCCL and data loaders put what they share",
        "Start the container with --shm-size=1g or more (--ipc=host), or remove what fills /dev/shm",
    )
    found += _below(
        {rank: _limit(known, "nofile") for rank, known in facts.items()},
        files,
        facts,
        lambda least: f"a limit of {least} open files, where {len(facts)} ranks may need {files}",
        f"Raise it before the launch (ulimit -n {max(files, 65536)}), or LimitNOFILE of the service that starts it",
    )
    if len({known.node for known in facts.values()}) > 1:
        found += _below(
            {rank: _limit(known, "memlock") for rank, known in facts.items() if _uses_rdma(known)},
            MEMLOCK_BYTES,
            facts,
            lambda least: f"a limit of {_mib(least)} on locked memory, with which NCCL cannot use InfiniBand or RoCE",
            "Set it to unlimited (ulimit -l unlimited, --ulimit memlock=-1 for a container, LimitMEMLOCK=infinity "
            "for slurmd), or do without the adapters (NCCL_IB_DISABLE=1)",
        )
    return found


def _below(
    amounts: Mapping[int, int | None], enough: int, facts: Facts, said: Callable[[int], str], next_step: str
) -> list[PreflightFinding]:
    """A warning about all ranks whose limit is too low; None is unlimited or unknown."""
    short = {rank: amount for rank, amount in sorted(amounts.items()) if amount is not None and amount < enough}
    if not short:
        return []
    sentence = f"{place_text(short, facts)} {have(short)} {said(min(short.values()))}"
    return [finding(Code.LIMIT_LOW, "warn", "node", list(short), facts, sentence, next_step)]


def _limit(known: InventoryFacts, name: str) -> int | None:
    """None if it is unlimited or unknown."""
    limit = known.limits.get(name, -1)
    return limit if limit >= 0 else None


def _uses_rdma(known: InventoryFacts) -> bool:
    return (
        bool(known.rdma_devices)
        and known.has_gpu
        and known.environment.get("NCCL_IB_DISABLE", "0") in ("", "0")
        and known.environment.get("NCCL_NET", "").casefold() != "socket"
    )


def _mib(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


# Do the nodes share a network, and do the settings name interfaces that exist?

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def no_common_network(facts: Facts) -> list[PreflightFinding]:
    """A warning about nodes outside the network that most nodes share. It is no failure: networks may be routed."""
    first = {known.node: rank for rank, known in sorted(facts.items(), reverse=True)}
    networks = {node: _networks(facts[rank]) for node, rank in first.items()}
    _forget_private_bridges(networks, {node: machine_of(facts[rank]) for node, rank in first.items()})
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
        return [finding(Code.NO_COMMON_NETWORK, "warn", "job", sorted(facts), facts, sentence, next_step)]
    inside = [rank for rank in sorted(facts) if facts[rank].node in together]
    sentence = (
        f"{place_text(outside, facts)} {have(outside)} no address in {best}, where {place_text(inside, facts)} "
        f"{have(inside)} one"
    )
    return [finding(Code.NO_COMMON_NETWORK, "warn", "node", outside, facts, sentence, next_step)]


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


def interfaces_named(facts: Facts) -> list[PreflightFinding]:
    """Settings that name only interfaces that the rank's host lacks, so that the backend cannot start."""
    wrong: dict[tuple[str, str], list[int]] = {}
    for setting, matches in (("NCCL_SOCKET_IFNAME", nccl_matches), ("GLOO_SOCKET_IFNAME", gloo_matches)):
        for rank in sorted(facts):
            value, interfaces = facts[rank].environment.get(setting, ""), usable_interfaces(facts[rank])
            if value and interfaces and not any(matches(value, name) for name in interfaces):
                wrong.setdefault((setting, value), []).append(rank)
    found = []
    for (setting, value), ranks in wrong.items():
        on_gpu = setting.startswith("NCCL")
        uses_it = any(facts[rank].device and facts[rank].has_gpu == on_gpu for rank in ranks)
        grade: Grade = "fail" if uses_it else "warn"
        has = ", ".join(usable_interfaces(facts[ranks[0]]))
        sentence = f"{setting}={value} names no interface of {place_text(ranks, facts)}; there are: {has}"
        found.append(
            finding(
                Code.INTERFACE_MISSING,
                grade,
                "node",
                ranks,
                facts,
                sentence,
                f"Set {setting} to one of these, or unset it",
            )
        )
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


# Ranks that share a GPU, and ranks without a GPU: NCCL refuses them or hangs.

_MULTI_RANK_NCCL = (2, 30)


def shared_gpus(facts: Facts) -> list[PreflightFinding]:
    """One finding per host, about its GPUs that more than one rank uses."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(facts):
        known = facts[rank]
        if known.uuid:
            users.setdefault((machine_of(known), known.uuid), []).append(rank)
    of_host: dict[str, list[tuple[str, list[int]]]] = {}
    for (host, uuid), ranks in users.items():
        if len(ranks) > 1:
            of_host.setdefault(host, []).append((uuid, ranks))
    return [_shared_finding(shared, facts) for shared in of_host.values()]


def _shared_finding(shared: list[tuple[str, list[int]]], facts: Facts) -> PreflightFinding:
    uuid, ranks = shared[0]
    known = facts[ranks[0]]
    about = ", ".join(word for word in (known.device_name, known.pci_bus) if word)
    more = f", and {len(shared) - 1} more GPUs of this host are shared, too" if len(shared) > 1 else ""
    allowed = all(_may_share(facts, rank) for _, members in shared for rank in members)
    means = "NCCL is set to allow it" if allowed else "NCCL refuses it, or hangs on it"
    everyone = [rank for _, members in shared for rank in members]
    return finding(
        Code.GPU_SHARED,
        "warn" if allowed else "fail",
        "gpu",
        everyone,
        facts,
        f"{place_text(ranks, facts)} share one GPU, {uuid}{f' ({about})' if about else ''}{more}; {means}",
        "" if allowed else _next(ranks, facts),
        uuid,
    )


def _may_share(facts: Facts, rank: int) -> bool:
    """From NCCL 2.30 on, and only when asked for."""
    version = tuple(int(number) for number in re.findall(r"\d+", facts[rank].versions.get("nccl", ""))[:2])
    return facts[rank].environment.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and version >= _MULTI_RANK_NCCL


def _next(ranks: list[int], facts: Facts) -> str:
    host = facts[ranks[0]].host or "the host"
    sharing = f"{ranks_text(ranks)} both" if len(ranks) == 2 else ranks_text(ranks)
    if len({facts[rank].node for rank in ranks}) > 1:
        return (
            f"Two launches run on {host}: give each its own GPUs with CUDA_VISIBLE_DEVICES, "
            "or start one launch there with a larger --nproc-per-node"
        )
    visible = facts[ranks[0]].environment.get("CUDA_VISIBLE_DEVICES", "")
    if len({facts[rank].local_rank for rank in ranks}) < len(ranks):
        return (
            f"{sharing} have local rank {facts[ranks[0]].local_rank}: with --virtual-local-rank, or in containers, "
            "each rank needs a CUDA_VISIBLE_DEVICES of its own"
        )
    if visible:
        return f"{sharing} find it through CUDA_VISIBLE_DEVICES={visible}: name a different GPU for each rank of {host}"
    return (
        f"Start as many ranks on {host} as it has GPUs (--nproc-per-node), and let each use the GPU of its local rank: "
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"
    )


def ranks_without_gpu(facts: Facts) -> list[PreflightFinding]:
    """Ranks on the CPU in a job with GPUs, including ranks whose GPU could not be read."""
    without = [rank for rank in sorted(facts) if not facts[rank].has_gpu]
    with_gpu = [rank for rank in sorted(facts) if facts[rank].has_gpu]
    blind = [rank for rank in without if facts[rank].gpus_visible == 0]
    stuck = [rank for rank in without if facts[rank].gpus_visible is None and facts[rank].device_error]
    too_many = [rank for rank in without if facts[rank].gpus_visible]
    others = place_text(with_gpu, facts)
    found = []
    if with_gpu and blind:
        sentence = f"{place_text(blind, facts)} {have(blind)} no GPU{_why(blind, facts)}, {others} {have(with_gpu)} one"
        next_step = (
            "Run nvidia-smi there: if it lists the GPUs, look at CUDA_VISIBLE_DEVICES, and whether the driver is new "
            "enough for this torch"
        )
        found.append(finding(Code.GPU_MISSING, "fail", "node", blind, facts, sentence, next_step))
    if with_gpu and stuck:
        sentence = f"{place_text(stuck, facts)} cannot use {_their(stuck)} GPU{_why(stuck, facts)}, {others} can"
        next_step = "Run nvidia-smi there: if it hangs or reports an error, too, the GPU or the node needs a reset"
        found.append(finding(Code.GPU_MISSING, "fail", "rank", stuck, facts, sentence, next_step))
    if too_many:
        most = max(facts[rank].gpus_visible or 0 for rank in too_many)
        sentence = (
            f"{place_text(too_many, facts)} {have(too_many)} no GPU of {_their(too_many)} own: the local rank is "
            f"beyond the {most} that can be seen, so the CPU is tested instead"
        )
        next_step = f"Start at most {most} per node (--nproc-per-node {most}), unless the script is to run on the CPU"
        found.append(finding(Code.GPU_MISSING, "warn", "node", too_many, facts, sentence, next_step))
    return found


def _their(ranks: list[int]) -> str:
    return "its" if len(ranks) == 1 else "their"


def _why(ranks: list[int], facts: Facts) -> str:
    error = next((facts[rank].device_error for rank in ranks if facts[rank].device_error), "")
    return f" ({error})" if error else ""
