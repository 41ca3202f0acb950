"""Which rank differs from the others: by the result of the same matmul, or by its time. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ....core.preflight import Grade, InventoryFacts, PreflightFinding, Subject
from ....core.text import ranks_text
from ..steps import ComputeResult

# Ranks that differ in one value: which ranks have which value, the minority first, and the words for it.

Facts = Mapping[int, InventoryFacts]

_MOST_SIDES = 4
_MOST_HOSTS = 3


class EqualRanks(NamedTuple):
    """Ranks with the same value."""

    value: str
    ranks: list[int]


def sides_of(values: Mapping[int, str]) -> list[EqualRanks]:
    """The ranks of each value. The smallest side comes first; of equal sides, that of the lowest rank last.

    >>> sides_of({0: "2.27", 1: "2.27", 2: "2.21"})
    [Side(value='2.21', ranks=[2]), Side(value='2.27', ranks=[0, 1])]
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
    """What differs from the majority: whole nodes or ranks. Without a majority it is the job."""
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
) -> PreflightFinding:
    """A finding of this stage about these ranks, in this order, and their hosts."""
    ranks = list(ranks)
    next_sentence = f"{next_step}." if next_step else ""
    return PreflightFinding(
        "consistency", grade, subject, ranks, hosts_of(ranks, facts), sentence, next_sentence, device
    )


def have(ranks: list[int]) -> str:
    """The verb for them."""
    return "has" if len(ranks) == 1 else "have"


STAGE = "compute"


def odd_digests(results: Mapping[int, ComputeResult], hosts: Mapping[int, str]) -> list[PreflightFinding]:
    """Ranks whose bits differ from those of most ranks with the same device type. Grade fail.

    Two ranks that agree are right, since two wrong ones would differ in their bits. If ranks 0 and 1 have `a` and
    rank 2 has `b`, rank 2 is wrong. With one `a` and one `b` it is undetermined.
    """
    by_type: dict[str, dict[str, list[int]]] = {}
    for rank in sorted(results):
        result = results[rank]
        by_type.setdefault(result.device_type, {}).setdefault(result.digest, []).append(rank)
    found: list[PreflightFinding] = []
    for device_type, ranks_of in sorted(by_type.items(), key=lambda item: min(item[1].values())):
        if len(ranks_of) == 1:
            continue
        camps = sorted(ranks_of.values(), key=lambda ranks: (-len(ranks), ranks))
        if len(camps[0]) == len(camps[1]):
            found.append(_undetermined(camps, device_type, hosts))
        else:
            found += [_odd(rank, camps[0], results, hosts) for camp in camps[1:] for rank in camp]
    return found


def slow_devices(
    results: Mapping[int, ComputeResult], hosts: Mapping[int, str], factor: float = 1.5
) -> list[PreflightFinding]:
    """Ranks that took more than `factor` times the median of all ranks. Grade warn."""
    if len(results) < 2:
        return []
    # the lower median: of two ranks, the slower is compared with the faster
    median = statistics.median_low(result.milliseconds for result in results.values())
    kinds = len({result.device_type for result in results.values()})
    found = []
    for rank in sorted(results):
        result = results[rank]
        if result.milliseconds <= factor * median:
            continue
        kind = f" ({result.device_type}; the job has {kinds} kinds of device)" if kinds > 1 else ""
        sentence = (
            f"{_who(rank, hosts)} took {result.milliseconds:.3g} ms for a matmul, {result.milliseconds / median:.1f} "
            f"times the median of all {len(results)} ranks, {median:.3g} ms{kind}"
        )
        next_ = (
            "Every step waits for it: look at the GPU's clocks, temperature and power limit, and for other processes."
            if _is_gpu(result)
            else "Every step waits for it: look for other load on this host and at the rank's CPU limits."
        )
        found.append(_finding("warn", _subject(result), [rank], hosts, sentence, next_, result.uuid))
    return found


def _odd(
    rank: int,
    right: list[int],
    results: Mapping[int, ComputeResult],
    hosts: Mapping[int, str],
) -> PreflightFinding:
    mine = results[rank]
    sentence = (
        f"{_who(rank, hosts)} computes another matmul: its bits ({mine.digest}) are not those on which "
        f"{ranks_text(right)} with the same kind of device agree ({results[right[0]].digest})"
    )
    thing = f"GPU {mine.uuid}" if mine.uuid else "this GPU" if _is_gpu(mine) else "this host's CPU"
    next_ = f"Take {thing} out of service: it computes wrong numbers without any error."
    return _finding("fail", _subject(mine), [rank], hosts, sentence, next_, mine.uuid)


def _undetermined(camps: Sequence[list[int]], device_type: str, hosts: Mapping[int, str]) -> PreflightFinding:
    largest = [camp for camp in camps if len(camp) == len(camps[0])]
    sides = " and ".join(f"{ranks_text(camp)} ({', '.join(hosts_among(camp, hosts))})" for camp in largest[:4])
    more = f" and {len(largest) - 4} more" if len(largest) > 4 else ""
    sentence = (
        f"the same matmul has {len(camps)} different results on devices of one kind ({device_type}); {sides}{more} "
        f"contradict each other, so it is undetermined which is wrong"
    )
    next_ = "Run `gpuwatch check` with another node or GPU of the same kind: whoever it contradicts computes wrong."
    return _finding("fail", "job", sorted(rank for camp in camps for rank in camp), hosts, sentence, next_)


def _finding(
    grade: Grade,
    subject: Subject,
    ranks: list[int],
    hosts: Mapping[int, str],
    sentence: str,
    next_: str,
    device: str = "",
) -> PreflightFinding:
    return PreflightFinding(STAGE, grade, subject, ranks, hosts_among(ranks, hosts), sentence, next_, device)


def _who(rank: int, hosts: Mapping[int, str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if hosts.get(rank) else f"rank {rank}"


def _is_gpu(result: ComputeResult) -> bool:
    return not result.device_type.startswith("cpu ")


def _subject(result: ComputeResult) -> Subject:
    return "gpu" if _is_gpu(result) else "rank"
