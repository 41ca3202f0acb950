"""Weights and buffers that one rank holds differently from its replicas, by the hashes that all ranks sent. Pure.

Only ranks at the same point are compared: same root, step and batch, same tensors, same process groups with as many
collectives on each. A root is left out if its ranks hold weights of their own, as stages, experts, shards that
torch does not know of, and independent jobs do: there some weight is neither the same on all ranks nor odd on one.

    rank   0   1   2   3
    w     17  17  17  90    odd on rank 3
    w     17  17  90  90    weights of their own: the root is left out
    b      4   5   6   7    statistics of each rank's own data: the buffer is left out

A buffer that changes later counts only if torch counted no change of it on that rank: code that writes a rank's own
values, or puts a new tensor in its place, leaves a trace there. With two ranks this holds for weights, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy

from ...core.events.across_ranks import HashFlag
from ..facts.rank_facts import RankFacts

_ODD_SHARE = 8
"""At most one rank of this many is odd, and always one."""


@dataclass(frozen=True)
class OddTensor:
    """A weight or a buffer of one rank that is not what its replicas hold, up to the last comparison."""

    rank: int
    name: str
    is_buffer: bool
    since: int
    """The first batch in which it was seen to differ."""
    agreed_in: int | None
    """The last batch before that in which all agreed; None if there was none."""
    ranks: int
    """How many were compared."""


@dataclass(frozen=True)
class _HashSample:
    rank: int
    batch: int
    table: tuple[str, ...]
    clock: frozenset[tuple[str, int]]
    hashes: Any
    flags: Any


@dataclass(slots=True)
class _EntryHistory:
    """What is known of one line of the table."""

    agreed_in: int | None = None
    agreed_on: int = 0
    """The hash that all had then."""
    compared: bool = False
    odd: dict[int, int] = field(default_factory=dict)
    """Rank -> since when it is odd."""


def odd_tensors(ranks: list[RankFacts]) -> list[OddTensor]:
    """All odd tensors of an attempt, by rank and in the order of the table."""
    points: defaultdict[str, defaultdict[tuple[int, int], list[_HashSample]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for root, step, sample in _samples(rank):
            points[root][sample.batch, step].append(sample)
    found = [odd for by_point in points.values() for odd in _RootComparison().odd(by_point)]
    return sorted(found, key=lambda odd: odd.rank)


def _samples(rank: RankFacts) -> Iterator[tuple[str, int, _HashSample]]:
    tables = {(event.where.root, event.table): tuple(event.tensors) for event in rank.hashes if event.tensors}
    clocks: dict[str, frozenset[tuple[str, int]]] = {}
    for event in sorted(rank.hashes, key=lambda event: event.where.time_ns):
        where = event.where
        table = tables.get((where.root, event.table), ())
        # the script may have destroyed its groups before it ended
        clock = clocks[where.root] = frozenset(where.clock.items()) or clocks.get(where.root, frozenset())
        if table and len(event.hashes) == 4 * len(table) and len(event.flags) == len(table):
            hashes, flags = numpy.frombuffer(event.hashes, "<u4"), numpy.frombuffer(event.flags, numpy.uint8)
            yield where.root, where.step, _HashSample(rank.rank, where.batch, table, clock, hashes, flags)


class _RootComparison:
    def __init__(self) -> None:
        self._entries: defaultdict[str, _EntryHistory] = defaultdict(_EntryHistory)
        self._local: set[str] = set()
        """Lines that ranks hold values of their own for."""
        self._traces: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        """Line -> rank -> flags since the line agreed."""
        self._ranks = 0

    def odd(self, by_point: dict[tuple[int, int], list[_HashSample]]) -> list[OddTensor]:
        for _, samples in sorted(by_point.items()):
            groups: defaultdict[Any, dict[int, _HashSample]] = defaultdict(dict)
            for sample in samples:
                if any(count > 0 for _, count in sample.clock):
                    groups[sample.table, sample.clock][sample.rank] = sample
            for group in groups.values():
                if len(group) > 1:
                    self._compare([group[rank] for rank in sorted(group)])
        if any(line.startswith("w ") for line in self._local):
            return []
        return [
            OddTensor(rank, line.split(" ")[1], line.startswith("b "), since, of.agreed_in, self._ranks)
            for line, of in self._entries.items()
            if line not in self._local
            for rank, since in of.odd.items()
        ]

    def _compare(self, group: list[_HashSample]) -> None:
        hashes, flags = (numpy.stack([getattr(one, name) for one in group]) for name in ("hashes", "flags"))
        self._ranks = max(self._ranks, len(group))
        same = (hashes == hashes[0]).all(axis=0)
        for column, line in enumerate(group[0].table):
            of, traces = self._entries[line], self._traces[line]
            for one, flag in zip(group, flags[:, column].tolist(), strict=True):
                traces[one.rank] |= flag
            if same[column]:
                of.agreed_in, of.agreed_on = group[0].batch, int(hashes[0, column])
                of.odd.clear()
                traces.clear()
            else:
                odd = self._odd_ranks(group, hashes[:, column], line, of)
                if not odd:
                    self._local.add(line)
                of.odd = {rank: of.odd.get(rank, group[0].batch) for rank in odd}
            of.compared = True

    def _odd_ranks(self, group: list[_HashSample], column: Any, line: str, of: _EntryHistory) -> list[int]:
        """The ranks that differ from the others, which agree; [] if that may be meant."""
        values, counts = numpy.unique(column, return_counts=True)
        most = int(counts.max())
        ranks = [one.rank for one in group]
        was_odd = of.odd.keys()
        if len(group) == 2:
            unchanged = column == of.agreed_on
            odd = [rank for rank, is_same in zip(ranks, unchanged, strict=True) if not is_same]
            is_known = of.agreed_in is not None and len(odd) == 1 and not self._traces[line][odd[0]]
            return odd if is_known else []
        if most < len(group) - max(1, len(group) // _ODD_SHARE):
            return []
        usual = values[counts.argmax()]
        odd = [rank for rank, value in zip(ranks, column, strict=True) if value != usual]
        if line.startswith("b ") and of.compared and not set(odd) <= was_odd:
            traces = self._traces[line]
            replaced = any(traces[rank] & HashFlag.REPLACED for rank in ranks if rank not in odd)
            if of.agreed_in is None or replaced or any(traces[rank] for rank in odd):
                return []
        return odd
