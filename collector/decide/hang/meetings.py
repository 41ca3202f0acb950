"""Where ranks meet: one operation of one process group, which ranks stand in it, and which never began it. Pure.

A collective's number is the same on all members of its group as long as they issue the same ones. So a member that has
begun fewer than the number in which others wait did not come; and members that have begun different operations under
one number do not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ....core.recorder.group_table import members_of
from ....core.recorder.layout import GROUPS
from ....core.records import GroupState, Issued
from ....core.text.ranks_text import ranks_text

_SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce"})
"""All members must give as many elements. Others take uneven sizes on some backends."""

Kind = tuple[str, str, int, int]
"""operation, dtype, elements and root, as far as they must be the same on all members"""


@dataclass(frozen=True)
class Meeting:
    """One operation in which at least one rank stands."""

    group: str
    """Name of the group."""
    members: tuple[int, ...]
    number: int
    operation: Issued | None
    """As the first rank that stands in it has begun it; None if that is not known any more."""
    waiting: list[int]
    missing: list[int]
    """Members that never began it."""
    untold: list[int]
    """Members of which nothing is known."""

    def text(self, world_size: int) -> str:
        """`all_reduce`, `all_reduce of group 1 (ranks 4-7)`, `send to rank 1`"""
        name = self.operation.operation if self.operation is not None and self.operation.operation else "a collective"
        if self.number < 0 and self.operation is not None:
            peer = self.peer
            whom = f"rank {peer}" if peer is not None else "any rank"
            return f"{name} {'to' if name == 'send' else 'from'} {whom}"
        return name + group_text(self.group, self.members, world_size)

    @property
    def peer(self) -> int | None:
        """The rank that it sends to or receives from; None if it is a collective, or any rank will do."""
        at = self.operation.peer if self.operation is not None else -1
        return self.members[at] if self.number < 0 and 0 <= at < len(self.members) else None


@dataclass(frozen=True)
class Mismatch:
    """Members that have begun different operations under one number."""

    group: str
    members: tuple[int, ...]
    number: int
    kinds: dict[Kind, list[int]] = field(default_factory=dict)

    @property
    def odd(self) -> list[int]:
        """The ranks outside of the majority; [] if there is none."""
        most = max(self.kinds.values(), key=len)
        known = sum(map(len, self.kinds.values()))
        if 2 * len(most) <= known or 2 * len(most) <= len(self.members):
            return []
        return sorted(rank for ranks in self.kinds.values() if ranks is not most for rank in ranks)


def group_text(name: str, members: Sequence[int], world_size: int) -> str:
    """` of group 1 (ranks 4-7)`; "" for the default group, which torch calls 0."""
    if len(members) < world_size:
        return f" of group {name} ({ranks_text(list(members))})"
    return f" of group {name} (all ranks)" if name != "0" else ""


def kind_text(kind: Kind) -> str:
    """`all_reduce of 8 elements of float32`, `broadcast from the group's rank 0 of 3 elements of float32`"""
    operation, dtype, elements, root = kind
    text = operation
    if root >= 0:
        text += f" {'from' if operation in ('broadcast', 'scatter') else 'to'} the group's rank {root}"
    if elements >= 0:
        text += f" of {elements} element{'' if elements == 1 else 's'}"
    return text + (f" of {dtype}" if dtype else "")


def standing_at(groups: Iterable[GroupState], *, failed: bool = False) -> tuple[GroupState, int] | None:
    """Where a rank stands, by its own table: the group and the number; `failed`: or where it has just raised."""
    phases = ("issuing", "waiting", "failed") if failed else ("issuing", "waiting")
    inside = [group for group in groups if group.phase in phases and group.at]
    if not inside:
        return None
    latest = min(inside, key=lambda group: group.since_s)
    return latest, latest.at


def meetings_of(
    tables: Mapping[int, Sequence[GroupState]], places: Mapping[int, tuple[GroupState, int]], world_size: int
) -> list[Meeting]:
    """The operations in which the ranks of `places` stand. `tables` has what each rank shows that is known."""
    found: dict[tuple[str, tuple[int, ...], int], Meeting] = {}
    for rank, (state, number) in sorted(places.items()):
        members = tuple(members_of(state.members, world_size))
        operation = next((issued for issued in state.recent if issued.number == number), None)
        if number < 0:
            members_key = (*members, rank)  # each send and each receive is a meeting of its own
            found[state.name, members_key, number] = _of_two(rank, state, members, number, operation, places)
            continue
        known = found.get((state.name, members, number))
        if known is not None:
            known.waiting.append(rank)
            continue
        missing, untold = [], []
        for member in members:
            begun = begun_in(tables[member], state) if member in tables else None
            if begun is None:
                untold.append(member)
            elif begun < number:
                missing.append(member)
        found[state.name, members, number] = Meeting(state.name, members, number, operation, [rank], missing, untold)
    return list(found.values())


def mismatch_of(
    tables: Mapping[int, Sequence[GroupState]], places: Mapping[int, tuple[GroupState, int]], world_size: int
) -> Mismatch | None:
    """The first number under which members of a group have begun different operations, where a rank stands at or
    behind it. None if there is none, or if the numbers cannot be compared: all have ended a number that differs."""
    seen: dict[tuple[str, str], None] = {
        (state.name, state.members): None for state, number in places.values() if number > 0
    }
    for name, text in seen:
        members = tuple(members_of(text, world_size))
        states = {rank: _state(tables.get(rank, ()), name, text) for rank in members}
        of_number: dict[int, dict[Kind, list[int]]] = {}
        for rank, state in states.items():
            for issued in state.recent if state is not None else ():
                if issued.number > 0 and issued.operation:
                    of_number.setdefault(issued.number, {}).setdefault(_kind(issued), []).append(rank)
        for number in sorted(of_number):
            kinds = of_number[number]
            if len(kinds) < 2:
                continue
            ranks = [rank for ranks in kinds.values() for rank in ranks]
            if all((state := states[rank]) is not None and state.ended >= number for rank in ranks):
                return None
            if any(at >= number for state, at in places.values() if (state.name, state.members) == (name, text)):
                return Mismatch(name, members, number, kinds)
            break
    return None


def _of_two(
    rank: int,
    state: GroupState,
    members: tuple[int, ...],
    number: int,
    operation: Issued | None,
    places: Mapping[int, tuple[GroupState, int]],
) -> Meeting:
    """A send or a receive: its peer is missing unless it stands in the other half of it."""
    meeting = Meeting(state.name, members, number, operation, [rank], [], [])
    peer = meeting.peer
    if peer is None or operation is None:
        meeting.untold.extend(member for member in members if member != rank)
        return meeting
    place = places.get(peer)
    other = (
        next((issued for issued in place[0].recent if issued.number == place[1]), None) if place is not None else None
    )
    matches = (
        other is not None
        and place is not None
        and (place[0].name, place[0].members) == (state.name, state.members)
        and {other.operation, operation.operation} == {"send", "recv"}
        and (other.peer < 0 or (other.peer < len(members) and members[other.peer] == rank))
    )
    if not matches:
        meeting.missing.append(peer)
    return meeting


def _state(groups: Sequence[GroupState], name: str, members: str) -> GroupState | None:
    return next((group for group in groups if (group.name, group.members) == (name, members)), None)


def begun_in(groups: Sequence[GroupState], like: GroupState) -> int | None:
    """Number of the last collective that a rank with these groups has begun in the group `like`.

    None where it is not known: the rank has more groups than its table has room for.
    """
    state = _state(groups, like.name, like.members)
    if state is None:
        return None if len(groups) >= GROUPS else 0
    return state.begun


def _kind(issued: Issued) -> Kind:
    sized = issued.operation in _SAME_SIZE
    return issued.operation, issued.dtype, issued.elements if sized else -1, issued.peer
