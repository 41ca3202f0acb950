"""Which rank or link differs from the others: by the result of the same matmul, by its time, by its bandwidth. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from ....core.codes import Code
from ....core.preflight import BandwidthRow, Grade, PreflightFinding, Subject
from ....core.text import ranks_text
from ..steps import ComputeResult, LinkSpeed, RankMeasurements


def hosts_among(ranks: Iterable[int], hosts: Mapping[int, str]) -> list[str]:
    """The hosts of these ranks, each once, in the ranks' order."""
    return list(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))


def _finding(
    code: Code,
    stage: Literal["compute", "bandwidth"],
    grade: Grade,
    subject: Subject,
    ranks: list[int],
    hosts: Mapping[int, str],
    sentence: str,
    next_: str = "",
    device: str = "",
) -> PreflightFinding:
    return PreflightFinding(stage, grade, subject, ranks, hosts_among(ranks, hosts), sentence, next_, device, code=code)


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
        found.append(
            _finding(Code.SLOW_DEVICE, "compute", "warn", _subject(result), [rank], hosts, sentence, next_, result.uuid)
        )
    return found


def _odd(
    rank: int, right: list[int], results: Mapping[int, ComputeResult], hosts: Mapping[int, str]
) -> PreflightFinding:
    mine = results[rank]
    sentence = (
        f"{_who(rank, hosts)} gets a different matmul result: its bits ({mine.digest}) differ from those on which "
        f"{ranks_text(right)} with the same kind of device agree ({results[right[0]].digest})"
    )
    thing = f"GPU {mine.uuid}" if mine.uuid else "this GPU" if _is_gpu(mine) else "this host's CPU"
    next_ = f"Take {thing} out of service: it computes wrong numbers without any error."
    return _finding(Code.WRONG_NUMBERS, "compute", "fail", _subject(mine), [rank], hosts, sentence, next_, mine.uuid)


def _undetermined(camps: Sequence[list[int]], device_type: str, hosts: Mapping[int, str]) -> PreflightFinding:
    largest = [camp for camp in camps if len(camp) == len(camps[0])]
    sides = " and ".join(f"{ranks_text(camp)} ({', '.join(hosts_among(camp, hosts))})" for camp in largest[:4])
    more = f" and {len(largest) - 4} more" if len(largest) > 4 else ""
    sentence = (
        f"the same matmul has {len(camps)} different results on devices of one kind ({device_type}); {sides}{more} "
        f"contradict each other, so it is undetermined which is wrong"
    )
    next_ = (
        "Run `gpuwatch check` with another node or GPU of the same kind: the device that it contradicts computes "
        "wrong results."
    )
    return _finding(
        Code.WRONG_NUMBERS,
        "compute",
        "fail",
        "job",
        sorted(rank for camp in camps for rank in camp),
        hosts,
        sentence,
        next_,
    )


def _who(rank: int, hosts: Mapping[int, str]) -> str:
    return f"rank {rank} on {hosts[rank]}" if hosts.get(rank) else f"rank {rank}"


def _is_gpu(result: ComputeResult) -> bool:
    return not result.device_type.startswith("cpu ")


def _subject(result: ComputeResult) -> Subject:
    return "gpu" if _is_gpu(result) else "rank"


# Which link is slow, and whether the bandwidth is enough: from what all ranks measured.


def slowest(measured: Mapping[int, RankMeasurements]) -> tuple[int, BandwidthRow] | None:
    """The rank that took longest at the largest size that all ranks have measured, and its row."""
    sizes = [{row.size_bytes for row in one.rows} for one in measured.values()]
    common = set.intersection(*sizes) if sizes else set()
    if not common:
        return None
    rows = {rank: row for rank, one in measured.items() for row in one.rows if row.size_bytes == max(common)}
    rank = max(sorted(rows), key=lambda one: rows[one].time_us)
    return rank, rows[rank]


def below(
    measured: Mapping[int, RankMeasurements], hosts: Mapping[int, str], min_busbw: float
) -> PreflightFinding | None:
    """Grade fail if the slowest rank's bus bandwidth at the largest size is below `min_busbw` GB/s."""
    found = slowest(measured)
    if found is None or found[1].busbw_gbs >= min_busbw:
        return None
    row = found[1]
    sentence = (
        f"all_reduce of {size_text(row.size_bytes)} over {len(measured)} ranks has a bus bandwidth of "
        f"{row.busbw_gbs:g} GB/s, below the {min_busbw:g} GB/s of --min-busbw"
    )
    next_ = "Look at the links and at what NCCL chose (--nccl-debug): the transport, the interface, GPUDirect RDMA."
    links = slow_links(measured, hosts)
    if links:
        sentence += f"; {links[0].sentence}"
        if links[0].grade == "warn":
            return replace(links[0], grade="fail", sentence=sentence, code=Code.BANDWIDTH_LOW)
    return _finding(Code.BANDWIDTH_LOW, "bandwidth", "fail", "job", sorted(measured), hosts, sentence, next_)


def slow_links(
    measured: Mapping[int, RankMeasurements], hosts: Mapping[int, str], factor: float = 3.0
) -> list[PreflightFinding]:
    """Links that are slow compared with the best one of their kind (inside a host, between hosts). Grade warn.

    If all links of one host to others are slow and the links of the other hosts are not, the host is named. If no link
    is slow, the slowest one is reported with grade ok.
    """
    links = [link for one in measured.values() for link in one.links]
    inside = [link for link in links if hosts.get(link.first) == hosts.get(link.second)]
    between = [link for link in links if hosts.get(link.first) != hosts.get(link.second)]
    found = [*_slow(inside, hosts, factor), *_slow_between(between, hosts, factor)]
    return found or _none_slow(between or inside, hosts)


def size_text(size: int) -> str:
    """`256 MiB`."""
    return f"{size / (1 << 20):g} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"


def _slow(links: Sequence[LinkSpeed], hosts: Mapping[int, str], factor: float) -> list[PreflightFinding]:
    best = max((link.gbs for link in links), default=0.0)
    found = []
    for link in sorted(links, key=lambda link: (link.gbs, link.first)):
        if link.gbs * factor >= best:
            continue
        sentence = (
            f"the link between {_link_text(link, hosts)} moves {link.gbs:g} GB/s each way, where the best one of its "
            f"kind moves {best:g}"
        )
        next_ = (
            "Look at the cable, the port's speed and its error counters, and at whether both sides use the interface "
            "that they should."
        )
        found.append(
            _finding(Code.LINK_SLOW, "bandwidth", "warn", "link", [link.first, link.second], hosts, sentence, next_)
        )
    return found


def _slow_between(links: Sequence[LinkSpeed], hosts: Mapping[int, str], factor: float) -> list[PreflightFinding]:
    found = _slow(links, hosts, factor)
    for host in dict.fromkeys(host for slow in found for host in slow.hosts):
        of_host = [link for link in links if host in (hosts.get(link.first), hosts.get(link.second))]
        alike = max(link.gbs for link in of_host) <= factor * min(link.gbs for link in of_host)
        if alike and len(found) == len(of_host) > 1 and all(host in slow.hosts for slow in found):
            best = max(link.gbs for link in links)
            ranks = sorted(rank for rank, name in hosts.items() if name == host)
            sentence = (
                f"all {len(of_host)} links of {host} to other nodes are slow "
                f"({', '.join(f'{link.gbs:g}' for link in of_host)} GB/s each way, where the best one between others "
                f"moves {best:g})"
            )
            next_ = f"Look at the network interface, cable and port of {host}."
            return [_finding(Code.LINK_SLOW, "bandwidth", "warn", "node", ranks, hosts, sentence, next_)]
    return found


def _none_slow(links: Sequence[LinkSpeed], hosts: Mapping[int, str]) -> list[PreflightFinding]:
    if not links:
        return []
    slow, fast = (choose(links, key=lambda link: link.gbs) for choose in (min, max))
    range_text = f" (the fastest of {len(links)}: {fast.gbs:g})" if len(links) > 1 else ""
    which = "slowest link is between" if len(links) > 1 else "link between"
    verb = ", with" if len(links) > 1 else " moves"
    sentence = f"the {which} {_link_text(slow, hosts)}{verb} {slow.gbs:g} GB/s each way{range_text}"
    return [_finding(Code.LINK_SLOW, "bandwidth", "ok", "link", [slow.first, slow.second], hosts, sentence)]


def _link_text(link: LinkSpeed, hosts: Mapping[int, str]) -> str:
    return " and ".join(
        f"rank {rank} ({hosts[rank]})" if hosts.get(rank) else f"rank {rank}" for rank in (link.first, link.second)
    )
