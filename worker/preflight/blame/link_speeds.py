"""Which link is slow, and whether the bandwidth is enough: from what all ranks measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ....core.preflight import BandwidthRow, PreflightFinding
from ..steps import LinkSpeed, RankMeasurements
from .odd_ranks import hosts_among

STAGE = "bandwidth"


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
            return msgspec.structs.replace(links[0], grade="fail", sentence=sentence)
    ranks = sorted(measured)
    return PreflightFinding(STAGE, "fail", "job", ranks, hosts_among(ranks, hosts), sentence, next_)


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
    return [
        PreflightFinding(
            STAGE,
            "warn",
            "link",
            [link.first, link.second],
            hosts_among([link.first, link.second], hosts),
            f"the link between {_link_text(link, hosts)} moves {link.gbs:g} GB/s each way, where the best one of its "
            f"kind moves {best:g}",
            "Look at the cable, the port's speed and its error counters, and at whether both sides use the interface "
            "that they should.",
        )
        for link in sorted(links, key=lambda link: (link.gbs, link.first))
        if link.gbs * factor < best
    ]


def _slow_between(links: Sequence[LinkSpeed], hosts: Mapping[int, str], factor: float) -> list[PreflightFinding]:
    found = _slow(links, hosts, factor)
    for host in dict.fromkeys(host for slow in found for host in slow.hosts):
        of_host = [link for link in links if host in (hosts.get(link.first), hosts.get(link.second))]
        alike = max(link.gbs for link in of_host) <= factor * min(link.gbs for link in of_host)
        if alike and len(found) == len(of_host) > 1 and all(host in slow.hosts for slow in found):
            best = max(link.gbs for link in links)
            ranks = sorted(rank for rank, name in hosts.items() if name == host)
            return [
                PreflightFinding(
                    STAGE,
                    "warn",
                    "node",
                    ranks,
                    [host],
                    f"all {len(of_host)} links of {host} to other nodes are slow "
                    f"({', '.join(f'{link.gbs:g}' for link in of_host)} GB/s each way, where the best one between "
                    f"others moves {best:g})",
                    f"Look at the network interface, cable and port of {host}.",
                )
            ]
    return found


def _none_slow(links: Sequence[LinkSpeed], hosts: Mapping[int, str]) -> list[PreflightFinding]:
    if not links:
        return []
    slow, fast = (choose(links, key=lambda link: link.gbs) for choose in (min, max))
    range_text = f" (the fastest of {len(links)}: {fast.gbs:g})" if len(links) > 1 else ""
    which = "slowest link is between" if len(links) > 1 else "link between"
    verb = ", with" if len(links) > 1 else " moves"
    sentence = f"the {which} {_link_text(slow, hosts)}{verb} {slow.gbs:g} GB/s each way{range_text}"
    ranks = [slow.first, slow.second]
    return [PreflightFinding(STAGE, "ok", "link", ranks, hosts_among(ranks, hosts), sentence)]


def _link_text(link: LinkSpeed, hosts: Mapping[int, str]) -> str:
    return " and ".join(
        f"rank {rank} ({hosts[rank]})" if hosts.get(rank) else f"rank {rank}" for rank in (link.first, link.second)
    )
