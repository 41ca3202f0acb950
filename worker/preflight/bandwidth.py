"""How fast is an all_reduce, and which link is the slowest? The figures are defined as in nccl-tests.

The slowest link limits the speed of all ranks, so the times of an all_reduce do not show which link it is. After it,
each rank therefore sends to the next rank and receives the same amount from it. Pairs without a common rank do this at
the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ...core.preflight import BandwidthRow
from ..device.accelerator import tested_device
from .blame.odd_ranks import size_text
from .group_collectives import GroupCollectives
from .steps import LinkSpeed, RankMeasurements

SMALLEST = 64 << 10
_STEP = 4
_MOST_REPEATS = 20
_ROW_S = 0.2
"""Repeat a size for about this long."""
_SHARE_FOR_ROWS = 0.6
"""The share of the time for the all_reduce. The rest is for the links."""
_SWAPS = 8
"""The test of the links takes about this many times as long as one all_reduce of their size."""


LINK_BYTES = 1 << 20
"""For fewer bytes, the time depends more on the processes than on the link between them."""


def measure(group: GroupCollectives, largest_bytes: int = 0) -> RankMeasurements:
    """Measure sizes up to `largest_bytes` (0: the device's default), while the group's time allows.

    Polling does not affect the times: on CUDA the device's own clock measures them.
    """
    largest = largest_bytes or tested_device(group.device).sizes.all_reduce
    rows: list[BandwidthRow] = []
    longest_s: dict[int, float] = {}
    left_s = 0.0
    for size in sizes_up_to(largest):
        group.say(f"all_reduce of {size_text(size)}")
        began = time.monotonic()
        rows.append(all_reduce_row(group, size))
        # all ranks use the same, longest times, so that all stop at the same size
        longest_s[size] = _longest(group, rows[-1].time_us / 1e6)
        next_s = _longest(group, time.monotonic() - began) * _STEP * 2
        left_s = -_longest(group, time.monotonic() - group.deadline)
        if next_s > left_s - group.timeout_s * (1 - _SHARE_FOR_ROWS):
            break
    fitting = [size for size, seconds in longest_s.items() if seconds * _SWAPS < left_s]
    size = fitting[-1] if fitting else rows[0].size_bytes
    links: list[LinkSpeed] = []
    if size >= LINK_BYTES:
        for pairs in neighbours(len(group.ranks)):
            group.say("links")
            links += _link_speeds(group, pairs, size)
    return RankMeasurements(rows, links)


def sizes_up_to(largest: int) -> list[int]:
    """Sizes that grow by a factor of four and end at `largest`.

    >>> sizes_up_to(1 << 20)
    [65536, 262144, 1048576]
    """
    sizes = [largest]
    while sizes[-1] // _STEP >= SMALLEST:
        sizes.append(sizes[-1] // _STEP)
    return sizes[::-1]


def neighbours(count: int) -> list[list[tuple[int, int]]]:
    """The links of a ring, in rounds in which no rank has two of them.

    >>> neighbours(5)
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(4, 0)]]
    """
    if count == 2:
        return [[(0, 1)]]
    links = [(first, (first + 1) % count) for first in range(count)]
    if count % 2:
        return [links[0:-1:2], links[1:-1:2], links[-1:]]
    return [links[0::2], links[1::2]]


def row_of(size_bytes: int, seconds: float, count: int) -> BandwidthRow:
    """As nccl-tests' PERFORMANCE.md: each rank sends and receives 2 (n - 1) / n of the data in an all_reduce.

    >>> row_of(10**9, 0.1, 4)
    BandwidthRow(size_bytes=1000000000, time_us=100000.0, algbw_gbs=10.0, busbw_gbs=15.0)
    """
    algbw = size_bytes / seconds / 1e9
    return BandwidthRow(size_bytes, round(seconds * 1e6, 1), _digits(algbw), _digits(algbw * 2 * (count - 1) / count))


def _digits(value: float) -> float:
    """The number with four significant digits."""
    return float(f"{value:.4g}")


def all_reduce_row(group: GroupCollectives, size: int) -> BandwidthRow:
    """This rank's row for one size."""
    data = torch.zeros(size // 4, dtype=torch.float32, device=group.device)  # sums of zeros never overflow
    warm_s = _longest(group, _timed(group, "all_reduce", lambda: dist.all_reduce(data), 1))
    repeats = max(1, min(_MOST_REPEATS, int(_ROW_S / max(warm_s, 1e-6))))
    seconds = _timed(group, "all_reduce", lambda: dist.all_reduce(data), repeats)
    return row_of(size, seconds, len(group.ranks))


def _link_speeds(group: GroupCollectives, pairs: Sequence[tuple[int, int]], size: int) -> list[LinkSpeed]:
    """The speed of the pair in which this rank is the first. `pairs` are of places within the group."""
    place = group.ranks.index(group.rank)
    mine = next((pair for pair in pairs if place in pair), None)
    peer = sum(mine) - place if mine is not None else None
    out = torch.zeros(size // 4, dtype=torch.float32, device=group.device)
    into = torch.empty_like(out)

    def swap() -> None:
        if peer is None:
            return
        swaps = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
        for work in dist.batch_isend_irecv(swaps):
            work.wait()

    # Again the longest time of all ranks: both sides of a pair repeat equally often, and rounds do not overlap.
    warm_s = _longest(group, _timed(group, "the swap", swap, 1))
    seconds = _timed(group, "the swap", swap, 3 if warm_s < _ROW_S else 1)
    _longest(group, seconds)
    if mine is None or peer is None or place != mine[0]:
        return []
    return [LinkSpeed(group.rank, group.ranks[peer], _digits(size / seconds / 1e9))]


def _longest(group: GroupCollectives, seconds: float) -> float:
    """The longest time of all ranks, which all ranks get."""
    value = torch.tensor([seconds], dtype=torch.float64, device=group.device)
    group.run("all_reduce", value, op=dist.ReduceOp.MAX)
    return float(value.item())


def _timed(group: GroupCollectives, name: str, call: Callable[[], object], repeats: int) -> float:
    """Seconds of one call. NCCL's calls return at once. gloo's calls block, with the group's timeout."""

    def repeated() -> None:
        for _ in range(repeats):
            call()

    tested = tested_device(group.device)
    return tested.timed(repeated, group.deadline, lambda: group.too_late(name)) / repeats
