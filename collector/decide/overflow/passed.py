"""From which rank a value came that one was handed: what the ranks say of what they passed to each other. Pure.

A rank tells of each tensor that went into a collective or a message, or came out of it, and was not finite
(core.records.Passed). A row of a frame is matched with what came out last before it: the same step, dtype, number of
elements and kind of value. From there the edge is followed to who put it in, and on from rank to rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from ....core.recorder.group_table import members_of
from ....core.records import Passed
from ....core.roles import RoleKind, parse_role
from ....core.values import DTYPE_MAX
from ...diagnose.local_diagnosis import LocalDiagnosis
from ...facts.facts import RankFacts, RunFacts
from ..words import ranks_text

_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_MOST_HOPS = 64
_HANDED = ("outside", "received", "carried")


@dataclass(frozen=True)
class Fed:
    """How a value came to the rank of a diagnosis."""

    ways: tuple[Passed, ...]
    """What came out, on each rank on the way; the last one first."""
    put: Passed | None
    """What the first rank put in; None: all ranks put finite numbers in, and the sum of these was not."""
    summands: tuple[Passed, ...] = ()
    """What each rank tells of that sum."""

    @property
    def rank(self) -> int | None:
        """Who put it in; None: nobody, the sum overflowed."""
        return self.put.where.rank if self.put is not None else None


class Passages:
    """What the ranks of an attempt tell of what they passed to each other, found by operation."""

    def __init__(self, facts: RunFacts, attempt: int) -> None:
        self._ranks = {rank.rank: rank for rank in facts.of_attempt(attempt)}
        self._told: defaultdict[tuple[object, ...], list[Passed]] = defaultdict(list)
        for rank in self._ranks.values():
            for one in rank.passed:
                self._told[_key(one)].append(one)

    def fed_by(self, diagnosis: LocalDiagnosis) -> Fed | None:
        """How the value of a diagnosis came to its rank; None if it came by no way that was seen."""
        rank = self._ranks.get(diagnosis.rank)  # a process that is no rank shares no group
        if rank is None or diagnosis.source not in _HANDED or diagnosis.shape is None:
            return None
        elements = math.prod(diagnosis.shape)
        if elements < 2:  # a metric that is reduced looks the same
            return None
        came = [
            one
            for one in _came_out(rank, diagnosis.step, diagnosis.seq)
            if (one.value, one.dtype, one.elements) == (diagnosis.value, diagnosis.dtype, elements)
        ] or _reduced(rank, diagnosis, elements)
        return self._follow(came[-1]) if came else None

    def put_into_sum(self, diagnosis: LocalDiagnosis) -> Passed | None:
        """What one rank put into the sum of the gradients in which that of a diagnosis was; None if that is not known.

        Every other rank has put finite numbers into that sum.
        """
        rank = self._ranks.get(diagnosis.rank)
        if rank is None or diagnosis.shape is None:
            return None
        for came in _reduced(rank, diagnosis, math.prod(diagnosis.shape))[::-1]:
            told = self._of(came)
            put = {one.where.rank: one for one in told if not one.came_out}
            finite = {one.where.rank for one in told if one.came_out and one.given == "finite"}
            if len(put) == 1 and finite | put.keys() == set(_members(came)):
                return next(iter(put.values()))
        return None

    def _follow(self, came: Passed) -> Fed | None:
        ways: list[Passed] = []
        while came not in ways and len(ways) < _MOST_HOPS:
            ways.append(came)
            told = self._of(came)
            given = [one for one in told if not one.came_out]
            if not given and came.operation in _REDUCTIONS:
                summands = [one for one in told if one.given == "finite"]
                return Fed(tuple(ways), None, tuple(summands)) if _all_of(came, summands) else None
            put = given[0] if given else None
            if put is None or any(one.given == "not finite" and one.where.rank != put.where.rank for one in told):
                return None  # several did, or it is not known who
            before = _came_out(self._ranks[put.where.rank], put.where.step, put.where.seq)
            before = [one for one in before if one.value == put.value and one != came and _is_same_tensor(one, put)]
            if not before:
                return Fed(tuple(ways), put)
            came = before[-1]
        return None

    def _of(self, came: Passed) -> list[Passed]:
        """What all ranks tell of the operation out of which something came."""
        if came.operation == "recv":
            return self._told.get(("send", came.group, came.number, came.tag, came.peer, came.where.rank), [])
        # a group of another mesh may have the same name, and no member in common
        members = set(_members(came))
        return [one for one in self._told.get(_key(came), []) if one.where.rank in members]


def _key(one: Passed) -> tuple[object, ...]:
    if one.operation == "send":
        return one.operation, one.group, one.number, one.tag, one.where.rank, one.peer
    return one.operation, one.group, one.number


def _members(one: Passed) -> list[int]:
    return members_of(one.members, most=1 << 16)


def _came_out(rank: RankFacts, step: int, seq: int) -> list[Passed]:
    """What came out on a rank in a step, up to a place; the earliest first."""
    found = [one for one in rank.passed if one.came_out and one.where.step == step and one.where.seq <= seq]
    return sorted(found, key=lambda one: (one.where.seq, one.where.time_ns))


def _reduced(rank: RankFacts, diagnosis: LocalDiagnosis, elements: int) -> list[Passed]:
    """What came out of reductions that a gradient can have been a part of, in whatever dtype they were reduced."""
    if parse_role(diagnosis.role).kind is not RoleKind.GRAD_WEIGHT:
        return []
    return [
        one
        for one in _came_out(rank, diagnosis.step, diagnosis.seq)
        if one.operation in _REDUCTIONS and one.value == diagnosis.value and _elements_of(one) >= max(2, elements)
    ]


def _elements_of(one: Passed) -> int:
    """Of all ranks together: the gradient of a sharded weight has the shape of the whole."""
    return one.elements * (len(_members(one)) if one.operation == "reduce_scatter" else 1)


def _is_same_tensor(came: Passed, put: Passed) -> bool:
    """Whether what a rank was handed can be what it passed on. The same operation's own output is not."""
    if (came.operation, came.group, came.number) == (put.operation, put.group, put.number):
        return False
    return (came.dtype, came.elements) == (put.dtype, put.elements)


def _all_of(came: Passed, summands: list[Passed]) -> bool:
    """Whether each rank's own was finite, and so large that the sum of all can have overflowed. A sum is never nan."""
    members = _members(came)
    sizes = {one.where.rank: one.given_max or 0.0 for one in summands}
    limit = DTYPE_MAX.get(came.dtype)
    return (
        came.value != "nan" and limit is not None and set(sizes) == set(members) and sum(sizes.values()) > limit * 0.999
    )


def way_text(one: Passed) -> str:
    """`all_reduce 7 of process group 0`, `message 3 from rank 0 to rank 1`."""
    if one.operation == "send":
        return f"message {one.number} from rank {one.where.rank} to rank {one.peer}"
    if one.operation == "recv":
        return f"message {one.number} from rank {one.peer} to rank {one.where.rank}"
    return f"{one.operation} {one.number} of process group {one.group} ({ranks_text(_members(one))})"


def fed_lines(fed: Fed) -> list[str]:
    """The way, from who put it in to who met it."""
    lines = []
    if fed.put is not None:
        lines.append(f"rank {fed.put.where.rank} put {fed.put.value} into {way_text(fed.put)}")
    lines += [
        f"rank {one.where.rank}: {one.value} came out of {way_text(one)}, {one.elements} elements of {one.dtype}"
        for one in fed.ways[::-1]
    ]
    for one in fed.summands[:8]:
        lines.append(f"rank {one.where.rank} put in finite numbers, abs max {one.given_max or 0.0:.2e}")
    return lines
