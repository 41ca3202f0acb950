"""Do all ranks have the same setup? Compares their inventories and names the relevant differences, in linear time."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....core.preflight import Grade, InventoryFacts, PreflightFinding
from ....core.text import ranks_text
from .odd_ranks import (
    EqualRanks,
    Facts,
    finding,
    have,
    hosts_of,
    odd_ranks,
    place_text,
    sides_of,
    sides_text,
    subject_of,
)

# Which settings must agree between ranks, and why, in one table. The prefix decides for a setting that is not in it.
#
# A difference stops the job only if it is known to hang it or to make NCCL refuse. If it may be meant, it is a warning.

UNSET = "not set"


def as_written(value: str) -> str:
    """NCCL ignores case."""
    return value.strip().casefold()


def as_flag(value: str) -> str:
    """An unset variable means 0."""
    return "0" if value in (UNSET, "") else as_written(value)


def whether_detail(value: str) -> str:
    """Of TORCH_DISTRIBUTED_DEBUG only DETAIL changes what is sent; INFO writes logs."""
    return str(as_written(value) == "detail")


@dataclass(frozen=True)
class SettingPolicy:
    """The grade of a difference in one setting. `meaning` maps values with the same meaning to one value."""

    grade: Grade
    why: str
    meaning: Callable[[str], str] = as_written
    inside_node_only: bool = False
    """A difference between nodes is only a warning."""


_PLANS = "each rank plans every collective by itself, and ranks whose plans differ wait for each other forever"
_SIZES = "both ends of a connection compute its buffers from this, and read past each other if they differ"
_NETWORK = "ranks on different networks cannot connect to each other"
_PATH = "both ends of a connection choose their way by themselves, and in one node they must choose the same"
_DETAIL = "with DETAIL a rank sends more collectives than the others, and all hang"
_TRANSPORT = "ranks that speak different protocols cannot connect to each other"

_TABLE: dict[str, SettingPolicy] = {
    **dict.fromkeys(("NCCL_ALGO", "NCCL_PROTO"), SettingPolicy("fail", _PLANS)),
    **dict.fromkeys(
        ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_NTHREADS"),
        SettingPolicy("fail", _PLANS),
    ),
    **dict.fromkeys(("NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE"), SettingPolicy("fail", _SIZES)),
    **dict.fromkeys(
        ("NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE", "NCCL_P2P_NVL_CHUNKSIZE"), SettingPolicy("fail", _SIZES)
    ),
    **dict.fromkeys(("NCCL_NET", "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID"), SettingPolicy("fail", _NETWORK)),
    **dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_OOB_NET_ENABLE"), SettingPolicy("fail", _NETWORK, as_flag)),
    # A node with broken peer-to-peer access may have it disabled in its /etc/nccl.conf on purpose.
    **dict.fromkeys(
        ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), SettingPolicy("fail", _PATH, as_flag, inside_node_only=True)
    ),
    **dict.fromkeys(("NCCL_P2P_LEVEL", "NCCL_CUMEM_ENABLE"), SettingPolicy("fail", _PATH, inside_node_only=True)),
    "TORCH_DISTRIBUTED_DEBUG": SettingPolicy("fail", _DETAIL, whether_detail),
    "GLOO_DEVICE_TRANSPORT": SettingPolicy("fail", _TRANSPORT),
}

_BY_PREFIX = {
    "NCCL_": SettingPolicy("warn", "NCCL has its own value for it on each rank: the slowest rank sets the pace"),
    "TORCH_": SettingPolicy(
        "warn", "torch has its own value for it on each rank: ranks may compute or fail in other ways"
    ),
}

_OWN_TO_A_HOST = {
    "NCCL_SOCKET_IFNAME",
    "NCCL_OOB_NET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_HOSTID",
    "NCCL_MNNVL_UUID",
    "NCCL_MNNVL_CLIQUE_ID",
    "NCCL_IGNORE_CPU_AFFINITY",
    "NCCL_RAS_ADDR",
    # what is written, and by whom
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_DEBUG_TIMESTAMP_FORMAT",
    "NCCL_SET_THREAD_NAME",
    "TORCH_LOGS",
    "TORCH_LOGS_OUT",
    "TORCH_LOGS_FORMAT",
    "TORCH_TRACE",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_CUDA_ARCH_LIST",
}
_ENDINGS_OF_PATHS = ("_FILE", "_DIR", "_PATH", "_HOME", "_CACHE")
_PARTS_OF_A_RANK = {"LOCAL", "RANK"}


def policy_of(name: str) -> SettingPolicy | None:
    """The policy for a setting; None if every rank or host may have its own value."""
    if name in _TABLE:
        return _TABLE[name]
    if name in _OWN_TO_A_HOST or name.endswith(_ENDINGS_OF_PATHS) or _PARTS_OF_A_RANK & set(name.split("_")):
        return None
    return next((policy for prefix, policy in _BY_PREFIX.items() if name.startswith(prefix)), None)


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
    found = [
        _below(
            facts,
            lambda known: known.shm_free,
            SHM_BYTES,
            lambda least: f"only {_mib(least)} of /dev/shm free, where NCCL and data loaders put what they share",
            "Start the container with --shm-size=1g or more (--ipc=host), or remove what fills /dev/shm",
        ),
        _below(
            facts,
            lambda known: _limit(known, "nofile"),
            files,
            lambda least: f"a limit of {least} open files, where {len(facts)} ranks may need {files}",
            f"Raise it before the launch (ulimit -n {max(files, 65536)}), or LimitNOFILE of the service that starts it",
        ),
    ]
    if len({known.node for known in facts.values()}) > 1:
        with_rdma = {rank: known for rank, known in facts.items() if _uses_rdma(known)}
        found.append(
            _below(
                with_rdma,
                lambda known: _limit(known, "memlock"),
                MEMLOCK_BYTES,
                lambda least: (
                    f"a limit of {_mib(least)} on locked memory, with which NCCL cannot use InfiniBand or RoCE"
                ),
                "Set it to unlimited (ulimit -l unlimited, --ulimit memlock=-1 for a container, LimitMEMLOCK=infinity "
                "for slurmd), or do without the adapters (NCCL_IB_DISABLE=1)",
            )
        )
    return [one for one in found if one is not None]


def _below(
    facts: Facts,
    amount: Callable[[InventoryFacts], int | None],
    enough: int,
    said: Callable[[int], str],
    next_step: str,
) -> PreflightFinding | None:
    """A warning about all ranks whose limit is too low."""
    known = {rank: value for rank in sorted(facts) if (value := amount(facts[rank])) is not None}
    short = [rank for rank, value in known.items() if value < enough]
    if not short:
        return None
    least = min(known[rank] for rank in short)
    return finding("warn", "node", short, facts, f"{place_text(short, facts)} {have(short)} {said(least)}", next_step)


def _limit(known: InventoryFacts, name: str) -> int | None:
    """None if it is unlimited or unknown."""
    limit = known.limits.get(name, -1)
    return limit if limit >= 0 else None


def _uses_rdma(known: InventoryFacts) -> bool:
    return (
        bool(known.rdma_devices)
        and known.device.startswith("cuda")
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


def interfaces_named(facts: Facts) -> list[PreflightFinding]:
    """Settings that name only interfaces that the rank's host lacks, so that the backend cannot start."""
    found: list[PreflightFinding] = []
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


# Ranks that share a GPU, and ranks without a GPU: NCCL refuses them or hangs.

_MULTI_RANK_NCCL = (2, 30)


def shared_gpus(facts: Facts) -> list[PreflightFinding]:
    """One finding per host, about its GPUs that more than one rank uses."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(facts):
        known = facts[rank]
        if known.uuid:
            users.setdefault((known.boot_id or known.host, known.uuid), []).append(rank)
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
    means = "NCCL was told to allow it" if allowed else "NCCL refuses it, or hangs on it"
    everyone = [rank for _, members in shared for rank in members]
    return finding(
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
    without = [rank for rank in sorted(facts) if not facts[rank].device.startswith("cuda")]
    with_gpu = [rank for rank in sorted(facts) if facts[rank].device.startswith("cuda")]
    blind = [rank for rank in without if facts[rank].gpus_visible == 0]
    stuck = [rank for rank in without if facts[rank].gpus_visible is None and facts[rank].device_error]
    too_many = [rank for rank in without if facts[rank].gpus_visible]
    found = []
    if with_gpu and blind:
        sentence = (
            f"{place_text(blind, facts)} {have(blind)} no GPU{_why(blind, facts)}, "
            f"{place_text(with_gpu, facts)} {have(with_gpu)} one"
        )
        next_step = (
            "Run nvidia-smi there: if it lists the GPUs, look at CUDA_VISIBLE_DEVICES, and whether the driver is new "
            "enough for this torch"
        )
        found.append(finding("fail", "node", blind, facts, sentence, next_step))
    if with_gpu and stuck:
        sentence = (
            f"{place_text(stuck, facts)} cannot use {'its' if len(stuck) == 1 else 'their'} GPU{_why(stuck, facts)}, "
            f"{place_text(with_gpu, facts)} can"
        )
        next_step = "Run nvidia-smi there: if it hangs or reports an error, too, the GPU or the node needs a reset"
        found.append(finding("fail", "rank", stuck, facts, sentence, next_step))
    if too_many:
        most = max(facts[rank].gpus_visible or 0 for rank in too_many)
        sentence = (
            f"{place_text(too_many, facts)} {have(too_many)} no GPU of {'its' if len(too_many) == 1 else 'their'} own: "
            f"the local rank is beyond the {most} that can be seen, so the CPU is tested instead"
        )
        next_step = f"Start at most {most} per node (--nproc-per-node {most}), unless the script is to run on the CPU"
        found.append(finding("warn", "node", too_many, facts, sentence, next_step))
    return found


def _why(ranks: list[int], facts: Facts) -> str:
    error = next((facts[rank].device_error for rank in ranks if facts[rank].device_error), "")
    return f" ({error})" if error else ""


@dataclass(frozen=True)
class ComparedProperty:
    """One property that should be the same on all ranks. Ranks for which it is unknown ("") are not compared."""

    name: str
    grade: Grade
    read: Callable[[InventoryFacts], str]
    why: str
    next: str


def _version(name: str) -> Callable[[InventoryFacts], str]:
    return lambda facts: facts.versions.get(name, "")


def _python_minor(facts: InventoryFacts) -> str:
    return ".".join(facts.versions.get("python", "").split(".")[:2])


def _script(facts: InventoryFacts) -> str:
    return f"sha256 {facts.script_digest[:12]}" if facts.script_digest else ""


_ONE_ENVIRONMENT = "Use one environment on all nodes: the same image, or one that they share"

COMPARED = (
    ComparedProperty(
        "NCCL",
        "fail",
        _version("nccl"),
        "NCCL refuses to connect ranks of different versions",
        "Install the same torch and NCCL on all nodes, and look for another libnccl.so in LD_LIBRARY_PATH",
    ),
    ComparedProperty(
        "torch",
        "fail",
        _version("torch"),
        "two releases of torch need not send the same collectives in the same order",
        _ONE_ENVIRONMENT,
    ),
    ComparedProperty(
        "the script file",
        "fail",
        _script,
        "ranks that run different code send different collectives, or compute something else",
        "Copy the script to all nodes again, or start it from a file system that they share",
    ),
    ComparedProperty(
        "CUDA", "warn", _version("cuda"), "kernels of different releases may round differently", _ONE_ENVIRONMENT
    ),
    ComparedProperty(
        "the driver",
        "warn",
        lambda facts: facts.driver,
        "NCCL then uses only what the oldest driver can do, or fails in the ways of a version that nobody tested",
        "Install one driver version on all nodes, or leave the odd ones out",
    ),
    ComparedProperty(
        "Python",
        "warn",
        _python_minor,
        "pickled objects, which torch sends between ranks, need not be readable by another minor version",
        _ONE_ENVIRONMENT,
    ),
    ComparedProperty(
        "gpuwatch", "warn", _version("gpuwatch"), "its parts may not understand each other", _ONE_ENVIRONMENT
    ),
    ComparedProperty(
        "the GPU's type",
        "warn",
        lambda facts: facts.device_name,
        "the slowest sets the pace, and different types round differently",
        "Ask the scheduler for one type of GPU",
    ),
)
"""The properties that are compared, the grade of a difference, and the reason."""


def compare(facts: Mapping[int, InventoryFacts]) -> list[PreflightFinding]:
    """All relevant differences between the ranks, and limits that are too low. Those that stop a job come first."""
    facts = dict(sorted(facts.items()))
    found = [
        *shared_gpus(facts),
        *ranks_without_gpu(facts),
        *(one for compared in COMPARED if (one := _difference(compared, facts)) is not None),
        *_settings(facts),
        *interfaces_named(facts),
        *no_common_network(facts),
        *tight_limits(facts),
    ]
    return sorted(found, key=lambda one: ("fail", "warn", "unknown", "ok").index(one.grade))


def _difference(compared: ComparedProperty, facts: Facts) -> PreflightFinding | None:
    values = {rank: value for rank, known in facts.items() if (value := compared.read(known))}
    sides = sides_of(values)
    return _finding(compared.name, compared.grade, sides, facts, compared.why, compared.next)


def _settings(facts: Facts) -> list[PreflightFinding]:
    found = []
    names = dict.fromkeys(name for known in facts.values() for name in known.environment)
    for name in sorted(names):
        policy = policy_of(name)
        if policy is None:
            continue
        values = {rank: known.environment.get(name, UNSET) for rank, known in facts.items()}
        meant = {rank: policy.meaning(value) for rank, value in values.items()}
        grade: Grade = policy.grade
        if policy.inside_node_only and not _differs_inside_a_host(meant, facts):
            grade = "warn"
        # of values with the same meaning, the spelling of the first rank
        spelling: dict[str, str] = {}
        for rank, meaning in meant.items():
            spelling.setdefault(meaning, values[rank])
        sides = [EqualRanks(spelling[side.value], side.ranks) for side in sides_of(meant)]
        one = _finding(name, grade, sides, facts, policy.why, f"Give {name} one value on all nodes")
        if one is not None:
            found.append(one)
    return found


def _differs_inside_a_host(values: Mapping[int, str], facts: Facts) -> bool:
    first: dict[str, str] = {}
    hosts = {rank: facts[rank].boot_id or facts[rank].host for rank in values}
    return any(first.setdefault(hosts[rank], value) != value for rank, value in values.items())


def _finding(
    name: str, grade: Grade, sides: list[EqualRanks], facts: Facts, why: str, next_step: str
) -> PreflightFinding | None:
    if len(sides) < 2:
        return None
    everyone = [rank for side in sides for rank in side.ranks]
    odd = odd_ranks(sides)
    hosts = hosts_of(odd, facts)
    look = f"; look at {hosts[0]} first" if len(hosts) == 1 and len(hosts_of(everyone, facts)) > 1 else ""
    sentence = f"{name} differs: {sides_text(sides, facts)}; {why}"
    return finding(grade, subject_of(sides, facts), odd or everyone, facts, sentence, next_step + look)
