"""Members of a process group that have begun different operations under one number. Pure.

The collector looks for them once ranks have stalled. A node agent does before, among its own ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..events.rank_standing import GroupState
from .group_table import MOST_RANKS, members_of

_SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce"})
"""All members must give as many elements. Others take uneven sizes on some backends."""

IssuedKind = tuple[str, str, int, int]
"""operation, dtype, elements and root, as far as they must be the same on all members"""


@dataclass(frozen=True)
class OperationMismatch:
    """Members that have begun different operations under one number."""

    group: str
    members: tuple[int, ...]
    number: int
    kinds: dict[IssuedKind, list[int]] = field(default_factory=dict)

    @property
    def odd(self) -> list[int]:
        """The ranks outside of the majority; [] if there is none."""
        most = max(self.kinds.values(), key=len)
        known = sum(map(len, self.kinds.values()))
        if 2 * len(most) <= known or 2 * len(most) <= len(self.members):
            return []
        return sorted(rank for ranks in self.kinds.values() if ranks is not most for rank in ranks)


def standing_at(groups: Sequence[GroupState], *, failed: bool = False) -> tuple[GroupState, int] | None:
    """Where a rank stands, by its own table and its device: the group and the number; `failed`: or where it has just
    raised.

    A host that waits on a group of its own, over gloo say, comes before its device.
    """
    phases = ("issuing", "waiting", "failed") if failed else ("issuing", "waiting")
    inside = [group for group in groups if group.phase in phases and group.at and not group.pending]
    if inside:
        latest = min(inside, key=lambda group: group.since_s)
        return latest, latest.at
    pending = [(group, group.pending) for group in groups if group.pending]
    return max(pending, key=lambda place: place[0].pending_s, default=None)


def mismatch_of(
    tables: Mapping[int, Sequence[GroupState]], places: Mapping[int, tuple[GroupState, int]], world_size: int
) -> OperationMismatch | None:
    """The first number under which members of a group have begun different operations, if a rank stands there or later.

    None if there is none. None also if all of them have ended that number: operations that differ cannot all end
    together, so the ranks' numbers do not count the same thing.
    """
    for name, text in dict.fromkeys((state.name, state.members) for state, at in places.values() if at > 0):
        members = tuple(members_of(text, world_size))
        states = {rank: group_in(tables.get(rank, ()), name, text) for rank in members}
        of_number: dict[int, dict[IssuedKind, list[int]]] = {}
        for rank, state in states.items():
            for issued in state.recent if state is not None else ():
                if issued.number > 0 and issued.operation:
                    elements = issued.elements if issued.operation in _SAME_SIZE else -1
                    kind = issued.operation, issued.dtype, elements, issued.peer
                    of_number.setdefault(issued.number, {}).setdefault(kind, []).append(rank)
        for number, kinds in sorted(of_number.items()):
            if len(kinds) < 2:
                continue
            ranks = [rank for ranks in kinds.values() for rank in ranks]
            if all((state := states[rank]) is not None and state.ended >= number for rank in ranks):
                return None
            if any(at >= number for state, at in places.values() if (state.name, state.members) == (name, text)):
                return OperationMismatch(name, members, number, kinds)
            break
    return None


def group_in(groups: Sequence[GroupState], name: str, members: str) -> GroupState | None:
    """The group of this name and with these members among a rank's; None if it has none."""
    return next((group for group in groups if (group.name, group.members) == (name, members)), None)


def all_stand_in_mismatch(tables: Mapping[int, Sequence[GroupState]], least_s: float) -> list[int]:
    """The members of a group that all stand in one number of it, for `least_s` seconds or more, and do not match there.

    [] where there is none, or where a member is not among the ranks of `tables`. Operations of different names may
    suit each other, and end once the last member comes; so none may be missing.
    """
    stand = {rank: place for rank, groups in tables.items() if (place := standing_at(groups)) is not None}
    places = {rank: place for rank, place in stand.items() if place[0].since_s >= least_s}
    found = mismatch_of(tables, places, MOST_RANKS)
    if found is None:
        return []
    there = {rank for rank, (group, number) in places.items() if (group.name, number) == (found.group, found.number)}
    told = {rank for ranks in found.kinds.values() for rank in ranks}
    return list(found.members) if there & told >= set(found.members) else []
