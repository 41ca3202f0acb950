"""Do all ranks have the same setup? Compares their inventories and names the relevant differences, in linear time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....core.preflight import Finding, Grade, InventoryFacts
from .limits import tight_limits
from .majority import Facts, Side, finding, hosts_of, odd_ranks, sides_of, sides_text, subject_of
from .networks import interfaces_named, no_common_network
from .setting_policies import UNSET, policy_of
from .shared_gpus import ranks_without_gpu, shared_gpus


@dataclass(frozen=True)
class Compared:
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
    Compared(
        "NCCL",
        "fail",
        _version("nccl"),
        "NCCL refuses to connect ranks of different versions",
        "Install the same torch and NCCL on all nodes, and look for another libnccl.so in LD_LIBRARY_PATH",
    ),
    Compared(
        "torch",
        "fail",
        _version("torch"),
        "two releases of torch need not send the same collectives in the same order",
        _ONE_ENVIRONMENT,
    ),
    Compared(
        "the script file",
        "fail",
        _script,
        "ranks that run different code send different collectives, or compute something else",
        "Copy the script to all nodes again, or start it from a file system that they share",
    ),
    Compared("CUDA", "warn", _version("cuda"), "kernels of different releases may round differently", _ONE_ENVIRONMENT),
    Compared(
        "the driver",
        "warn",
        lambda facts: facts.driver,
        "NCCL then uses only what the oldest driver can do, or fails in the ways of a version that nobody tested",
        "Install one driver version on all nodes, or leave the odd ones out",
    ),
    Compared(
        "Python",
        "warn",
        _python_minor,
        "pickled objects, which torch sends between ranks, need not be readable by another minor version",
        _ONE_ENVIRONMENT,
    ),
    Compared("gpuwatch", "warn", _version("gpuwatch"), "its parts may not understand each other", _ONE_ENVIRONMENT),
    Compared(
        "the GPU's type",
        "warn",
        lambda facts: facts.device_name,
        "the slowest sets the pace, and different types round differently",
        "Ask the scheduler for one type of GPU",
    ),
)
"""The properties that are compared, the grade of a difference, and the reason."""


def compare(facts: Mapping[int, InventoryFacts]) -> list[Finding]:
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


def _difference(compared: Compared, facts: Facts) -> Finding | None:
    values = {rank: value for rank, known in facts.items() if (value := compared.read(known))}
    sides = sides_of(values)
    return _finding(compared.name, compared.grade, sides, facts, compared.why, compared.next)


def _settings(facts: Facts) -> list[Finding]:
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
        sides = [Side(spelling[side.value], side.ranks) for side in sides_of(meant)]
        one = _finding(name, grade, sides, facts, policy.why, f"Give {name} one value on all nodes")
        if one is not None:
            found.append(one)
    return found


def _differs_inside_a_host(values: Mapping[int, str], facts: Facts) -> bool:
    first: dict[str, str] = {}
    hosts = {rank: facts[rank].boot_id or facts[rank].host for rank in values}
    return any(first.setdefault(hosts[rank], value) != value for rank, value in values.items())


def _finding(name: str, grade: Grade, sides: list[Side], facts: Facts, why: str, next_step: str) -> Finding | None:
    if len(sides) < 2:
        return None
    everyone = [rank for side in sides for rank in side.ranks]
    odd = odd_ranks(sides)
    hosts = hosts_of(odd, facts)
    look = f"; look at {hosts[0]} first" if len(hosts) == 1 and len(hosts_of(everyone, facts)) > 1 else ""
    sentence = f"{name} differs: {sides_text(sides, facts)}; {why}"
    return finding(grade, subject_of(sides, facts), odd or everyone, facts, sentence, next_step + look)
