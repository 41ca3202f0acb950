"""Do all ranks have the same setup? Compares their inventories and names the relevant differences, in linear time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ....core.codes import Code
from ....core.preflight import Grade, InventoryFacts, PreflightFinding, Subject
from .host_setups import (
    Facts,
    finding,
    hosts_of,
    interfaces_named,
    machine_of,
    no_common_network,
    place_text,
    ranks_without_gpu,
    shared_gpus,
    tight_limits,
)

_MOST_SIDES = 4


class EqualRanks(NamedTuple):
    """Ranks with the same value."""

    value: str
    ranks: list[int]


def sides_of(values: Mapping[int, str]) -> list[EqualRanks]:
    """The ranks of each value. The smallest side comes first; of equal sides, that of the lowest rank last.

    >>> sides_of({0: "2.27", 1: "2.27", 2: "2.21"})
    [EqualRanks(value='2.21', ranks=[2]), EqualRanks(value='2.27', ranks=[0, 1])]
    """
    ranks: dict[str, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(values[rank], []).append(rank)
    found = [EqualRanks(value, members) for value, members in ranks.items()]
    return sorted(found, key=lambda side: (len(side.ranks), -side.ranks[0]))


def odd_ranks(sides: list[EqualRanks]) -> list[int]:
    """The ranks outside the largest side, smallest side first. Empty if two sides are the largest."""
    if len(sides) < 2 or len(sides[-1].ranks) == len(sides[-2].ranks):
        return []
    return [rank for side in sides[:-1] for rank in side.ranks]


def subject_of(sides: list[EqualRanks], facts: Facts) -> Subject:
    """The nodes or ranks that differ from the majority; without a majority, the job."""
    odd = odd_ranks(sides)
    if not odd:
        return "job"
    members = Counter(known.node for known in facts.values())
    of_odd = Counter(facts[rank].node for rank in odd)
    whole = len(members) > 1 and all(count == members[node] for node, count in of_odd.items())
    return "node" if whole else "rank"


def sides_text(sides: list[EqualRanks], facts: Facts) -> str:
    """`2.21 on ranks 8-15 (node b), 2.27 on ranks 0-7 (node a)`."""
    shown = sides if len(sides) <= _MOST_SIDES else [*sides[: _MOST_SIDES - 1], sides[-1]]
    text = ", ".join(f"{side.value} on {place_text(side.ranks, facts)}" for side in shown)
    left = len(sides) - len(shown)
    return text + (f", and {left} other value{'s' if left > 1 else ''}" if left else "")


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
    """Only DETAIL of TORCH_DISTRIBUTED_DEBUG changes what ranks send; INFO writes logs."""
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

_POLICIES = {
    "NCCL_ALGO NCCL_PROTO NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_NTHREADS": (
        SettingPolicy("fail", _PLANS)
    ),
    "NCCL_BUFFSIZE NCCL_LL_BUFFSIZE NCCL_LL128_BUFFSIZE": SettingPolicy("fail", _SIZES),
    "NCCL_P2P_NET_CHUNKSIZE NCCL_P2P_PCI_CHUNKSIZE NCCL_P2P_NVL_CHUNKSIZE": SettingPolicy("fail", _SIZES),
    "NCCL_NET NCCL_SOCKET_FAMILY NCCL_COMM_ID": SettingPolicy("fail", _NETWORK),
    "NCCL_IB_DISABLE NCCL_OOB_NET_ENABLE": SettingPolicy("fail", _NETWORK, as_flag),
    # A node with broken peer-to-peer access may have it disabled in its /etc/nccl.conf on purpose.
    "NCCL_P2P_DISABLE NCCL_SHM_DISABLE": SettingPolicy("fail", _PATH, as_flag, inside_node_only=True),
    "NCCL_P2P_LEVEL NCCL_CUMEM_ENABLE": SettingPolicy("fail", _PATH, inside_node_only=True),
    "TORCH_DISTRIBUTED_DEBUG": SettingPolicy("fail", _DETAIL, whether_detail),
    "GLOO_DEVICE_TRANSPORT": SettingPolicy("fail", _TRANSPORT),
}
_TABLE = {name: policy for names, policy in _POLICIES.items() for name in names.split()}

_BY_PREFIX = {
    "NCCL_": SettingPolicy("warn", "the ranks then run NCCL with different values, and the slowest rank sets the pace"),
    "TORCH_": SettingPolicy(
        "warn", "the ranks then run torch with different values, and may compute or fail in different ways"
    ),
}

# ruff: noqa: SIM905  # a page of quoted names reads worse
_OWN_TO_A_HOST = frozenset(
    """
    NCCL_SOCKET_IFNAME NCCL_OOB_NET_IFNAME NCCL_IB_HCA NCCL_IB_GID_INDEX NCCL_HOSTID NCCL_MNNVL_UUID
    NCCL_MNNVL_CLIQUE_ID NCCL_IGNORE_CPU_AFFINITY NCCL_RAS_ADDR
    NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DEBUG_TIMESTAMP_FORMAT NCCL_SET_THREAD_NAME TORCH_LOGS TORCH_LOGS_OUT
    TORCH_LOGS_FORMAT TORCH_TRACE TORCH_CPP_LOG_LEVEL TORCH_SHOW_CPP_STACKTRACES TORCH_CUDA_ARCH_LIST
    """.split()
)
"""Settings of a host's own network and logs, which may differ between hosts."""
_ENDINGS_OF_PATHS = ("_FILE", "_DIR", "_PATH", "_HOME", "_CACHE")
_PARTS_OF_A_RANK = {"LOCAL", "RANK"}


def policy_of(name: str) -> SettingPolicy | None:
    """The policy for a setting; None if every rank or host may have its own value."""
    if name in _TABLE:
        return _TABLE[name]
    if name in _OWN_TO_A_HOST or name.endswith(_ENDINGS_OF_PATHS) or _PARTS_OF_A_RANK & set(name.split("_")):
        return None
    return next((policy for prefix, policy in _BY_PREFIX.items() if name.startswith(prefix)), None)


@dataclass(frozen=True)
class ComparedProperty:
    """One property that should be the same on all ranks. Ranks for which it is unknown ("") are not compared."""

    name: str
    grade: Grade
    read: Callable[[InventoryFacts], str]
    why: str
    next: str = "Use one environment on all nodes: the same image, or one that they share"


def _version(name: str) -> Callable[[InventoryFacts], str]:
    return lambda facts: facts.versions.get(name, "")


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
        "two releases of torch may send different collectives, or in a different order",
    ),
    ComparedProperty(
        "the script file",
        "fail",
        lambda facts: f"sha256 {facts.script_digest[:12]}" if facts.script_digest else "",
        "ranks that run different code send different collectives, or compute different results",
        "Copy the script to all nodes again, or start it from a file system that they share",
    ),
    ComparedProperty("CUDA", "warn", _version("cuda"), "kernels of different releases may round differently"),
    ComparedProperty(
        "the driver",
        "warn",
        lambda facts: facts.driver,
        "NCCL then uses only what the oldest driver supports, or fails in untested ways",
        "Install one driver version on all nodes, or leave the odd ones out",
    ),
    ComparedProperty(
        "Python",
        "warn",
        lambda facts: ".".join(facts.versions.get("python", "").split(".")[:2]),
        "another minor version may not be able to read the pickled objects that torch sends between ranks",
    ),
    ComparedProperty("gpuwatch", "warn", _version("gpuwatch"), "its parts may not understand each other"),
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
        *(one for compared in COMPARED for one in _difference(compared, facts)),
        *_settings(facts),
        *interfaces_named(facts),
        *no_common_network(facts),
        *tight_limits(facts),
    ]
    return sorted(found, key=lambda one: ("fail", "warn", "unknown", "ok").index(one.grade))


def _difference(compared: ComparedProperty, facts: Facts) -> list[PreflightFinding]:
    values = {rank: value for rank, known in facts.items() if (value := compared.read(known))}
    return _findings(
        Code.VERSIONS_DIFFER, compared.name, compared.grade, sides_of(values), facts, compared.why, compared.next
    )


def _settings(facts: Facts) -> list[PreflightFinding]:
    found: list[PreflightFinding] = []
    for name in sorted({name for known in facts.values() for name in known.environment}):
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
        found += _findings(
            Code.SETTING_DIFFERS, name, grade, sides, facts, policy.why, f"Give {name} one value on all nodes"
        )
    return found


def _differs_inside_a_host(values: Mapping[int, str], facts: Facts) -> bool:
    first: dict[str, str] = {}
    return any(first.setdefault(machine_of(facts[rank]), value) != value for rank, value in values.items())


def _findings(
    code: Code, name: str, grade: Grade, sides: list[EqualRanks], facts: Facts, why: str, next_step: str
) -> list[PreflightFinding]:
    if len(sides) < 2:
        return []
    everyone = [rank for side in sides for rank in side.ranks]
    odd = odd_ranks(sides)
    hosts = hosts_of(odd, facts)
    look = f"; look at {hosts[0]} first" if len(hosts) == 1 and len(hosts_of(everyone, facts)) > 1 else ""
    sentence = f"{name} differs: {sides_text(sides, facts)}; {why}"
    return [finding(code, grade, subject_of(sides, facts), odd or everyone, facts, sentence, next_step + look)]
