"""What a check that passed says of each node: how many of its ranks are good, on what, with which versions.

    n0: 8 of 8 GPUs OK, NVIDIA H100 80GB HBM3, torch 2.14.1, CUDA 13.0, NCCL 2.29.7, driver 580.95.05

It is the line of `torch-distributed-gpu-test.py` for a whole node. Nodes that are alike share one.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.preflight import InventoryFacts, PreflightFinding
from ...core.text import joined, ranks_text
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..report.sentence_parts import counted, grouped

_MOST_NAMED = 4
_OF_DEVICES = ("rank", "gpu")
_NOT_SHOWN = {"python", "gpuwatch"}


def checked_nodes(facts: RunFacts, ranks: list[RankFacts], findings: Iterable[PreflightFinding]) -> list[str]:
    """A line for each kind of node. A rank is OK unless a finding about it or its GPU is a failure. One that other load
    on its node has made slow has a warning, and is named."""
    graded: dict[str, set[int]] = {"fail": set(), "warn": set(), "unknown": set()}
    for found in findings:
        if found.subject in _OF_DEVICES and found.grade in graded:
            graded[found.grade].update(found.ranks)
    said: dict[str, list[str]] = {}
    for mine in grouped(sorted(ranks, key=lambda rank: rank.rank), lambda rank: rank.agent).values():
        known = [rank.inventory.facts for rank in mine if rank.inventory is not None and rank.inventory.facts]
        if len(known) == len(mine):
            bad, *noted = ([r.rank for r in mine if r.rank in graded[grade]] for grade in ("fail", "warn", "unknown"))
            said.setdefault(_text(known, bad, *noted), []).append(facts.host(mine[0]))
    return [f"{_names(hosts)}: {text}" for text, hosts in said.items()]


def _text(known: list[InventoryFacts], bad: list[int], warned: list[int], untested: list[int]) -> str:
    """`2 of 2 ranks OK on the CPU (rank 1 with a warning), torch 2.13.0`"""
    on_gpus = all(one.device not in ("", "cpu") for one in known)
    good, noun = len(known) - len(bad), "GPU" if on_gpus else "rank"
    tested = f"{good} of {counted(len(known), noun)} OK{'' if on_gpus else ' on the CPU'}"
    but = [f"{ranks_text(bad)} not"] if bad else []
    but += [f"{ranks_text(warned)} with {'a warning' if len(warned) == 1 else 'warnings'}"] if warned else []
    but += [f"{ranks_text(untested)} not tested in full"] if untested else []
    tested += f" ({', '.join(but)})" if but else ""
    names = sorted({one.device_name for one in known if one.device_name})
    shown = sorted(
        {name for one in known for name in one.versions} - _NOT_SHOWN, key=lambda name: (name != "torch", name)
    )
    versions = [
        f"{name if name == 'torch' else name.upper()} {joined(sorted({one.versions[name] for one in known}))}"
        for name in shown
        if all(one.versions.get(name) for one in known)
    ]
    drivers = sorted({one.driver for one in known if one.driver}) if on_gpus else []
    return ", ".join([tested, *names, *versions, *([f"driver {joined(drivers)}"] if drivers else [])])


def _names(hosts: list[str]) -> str:
    """`n0`; `n0 and n1, each`; `n0, n1, n2, n3 and 60 more, each`"""
    more = len(hosts) - _MOST_NAMED
    named = joined([*hosts[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])])
    return named if len(hosts) == 1 else f"{named}, each"
