"""Which rank differs from the others: by the result of the same matmul, or by its time. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ....core.preflight import Finding, Grade, Subject
from ....core.text.ranks_text import ranks_text
from ..reports import ComputeResult
from .majority import hosts_among

STAGE = "compute"


def odd_digests(results: Mapping[int, ComputeResult], hosts: Mapping[int, str]) -> list[Finding]:
    """Ranks whose bits differ from those of most ranks with the same device type. Grade fail.

    Two ranks that agree are right, since two wrong ones would differ in their bits. If ranks 0 and 1 have `a` and
    rank 2 has `b`, rank 2 is wrong. With one `a` and one `b` it is undetermined.
    """
    by_type: dict[str, dict[str, list[int]]] = {}
    for rank in sorted(results):
        result = results[rank]
        by_type.setdefault(result.device_type, {}).setdefault(result.digest, []).append(rank)
    found: list[Finding] = []
    for device_type, ranks_of in sorted(by_type.items(), key=lambda item: min(item[1].values())):
        if len(ranks_of) == 1:
            continue
        camps = sorted(ranks_of.values(), key=lambda ranks: (-len(ranks), ranks))
        if len(camps[0]) == len(camps[1]):
            found.append(_undetermined(camps, device_type, hosts))
        else:
            found += [_odd(rank, camps[0], results, hosts) for camp in camps[1:] for rank in camp]
    return found


def slow_devices(results: Mapping[int, ComputeResult], hosts: Mapping[int, str], factor: float = 1.5) -> list[Finding]:
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
) -> Finding:
    mine = results[rank]
    sentence = (
        f"{_who(rank, hosts)} computes another matmul: its bits ({mine.digest}) are not those on which "
        f"{ranks_text(right)} with the same kind of device agree ({results[right[0]].digest})"
    )
    thing = f"GPU {mine.uuid}" if mine.uuid else "this GPU" if _is_gpu(mine) else "this host's CPU"
    next_ = f"Take {thing} out of service: it computes wrong numbers without any error."
    return _finding("fail", _subject(mine), [rank], hosts, sentence, next_, mine.uuid)


def _undetermined(camps: Sequence[list[int]], device_type: str, hosts: Mapping[int, str]) -> Finding:
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
) -> Finding:
    return Finding(STAGE, grade, subject, ranks, hosts_among(ranks, hosts), sentence, next_, device)


def _who(rank: int, hosts: Mapping[int, str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if hosts.get(rank) else f"rank {rank}"


def _is_gpu(result: ComputeResult) -> bool:
    return not result.device_type.startswith("cpu ")


def _subject(result: ComputeResult) -> Subject:
    return "gpu" if _is_gpu(result) else "rank"
