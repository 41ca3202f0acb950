"""Ranks that differ in one value: which ranks have which value, the minority first, and the words for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ....core.preflight import Finding, Grade, InventoryFacts, Subject
from ....core.text.ranks_text import ranks_text

Facts = Mapping[int, InventoryFacts]

_MOST_SIDES = 4
_MOST_HOSTS = 3


class Side(NamedTuple):
    """Ranks with the same value."""

    value: str
    ranks: list[int]


def sides_of(values: Mapping[int, str]) -> list[Side]:
    """The ranks of each value. The smallest side comes first; of equal sides, that of the lowest rank last.

    >>> sides_of({0: "2.27", 1: "2.27", 2: "2.21"})
    [Side(value='2.21', ranks=[2]), Side(value='2.27', ranks=[0, 1])]
    """
    ranks: dict[str, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(values[rank], []).append(rank)
    found = [Side(value, members) for value, members in ranks.items()]
    return sorted(found, key=lambda side: (len(side.ranks), -side.ranks[0]))


def odd_ranks(sides: list[Side]) -> list[int]:
    """The ranks outside the largest side, smallest side first. Empty if two sides are the largest."""
    if len(sides) < 2 or len(sides[-1].ranks) == len(sides[-2].ranks):
        return []
    return [rank for side in sides[:-1] for rank in side.ranks]


def subject_of(sides: list[Side], facts: Facts) -> Subject:
    """What differs from the majority: whole nodes or ranks. Without a majority it is the job."""
    odd = odd_ranks(sides)
    if not odd:
        return "job"
    members = Counter(known.node for known in facts.values())
    of_odd = Counter(facts[rank].node for rank in odd)
    whole = len(members) > 1 and all(count == members[node] for node, count in of_odd.items())
    return "node" if whole else "rank"


def sides_text(sides: list[Side], facts: Facts) -> str:
    """`2.21 on ranks 8-15 (node b), 2.27 on ranks 0-7 (node a)`."""
    shown = sides if len(sides) <= _MOST_SIDES else [*sides[: _MOST_SIDES - 1], sides[-1]]
    text = ", ".join(f"{side.value} on {place_text(side.ranks, facts)}" for side in shown)
    left = len(sides) - len(shown)
    return text + (f", and {left} other value{'s' if left > 1 else ''}" if left else "")


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
    return hosts_among(ranks, {rank: known.host for rank, known in facts.items() if known.host})


def hosts_among(ranks: Iterable[int], hosts: Mapping[int, str]) -> list[str]:
    """The same, where the host of each rank is given."""
    return list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))


def finding(
    grade: Grade,
    subject: Subject,
    ranks: Iterable[int],
    facts: Facts,
    sentence: str,
    next_step: str = "",
    device: str = "",
) -> Finding:
    """A finding of this stage about these ranks, in this order, and their hosts."""
    ranks = list(ranks)
    next_sentence = f"{next_step}." if next_step else ""
    return Finding("consistency", grade, subject, ranks, hosts_of(ranks, facts), sentence, next_sentence, device)


def have(ranks: list[int]) -> str:
    """The verb for them."""
    return "has" if len(ranks) == 1 else "have"
