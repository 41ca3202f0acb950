"""Where ranks meet: one operation of one process group, which ranks stand in it, and which never began it. Pure.

A collective's number is the same on all members of its group as long as they issue the same ones. So a member that has
begun fewer than the number in which others wait did not come; and members that have begun different operations under
one number do not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...core.events.rank_standing import GroupState, IssuedOperation
from ...core.recorder.group_table import members_of
from ...core.recorder.layout import EARLIER_GROUPS
from ...core.recorder.operation_mismatch import IssuedKind, group_in
from ...core.text import ranks_text


@dataclass(frozen=True)
class PendingOperation:
    """One operation in which at least one rank stands."""

    group: str
    """Name of the group."""
    members: tuple[int, ...]
    number: int
    operation: IssuedOperation | None
    """As the first rank that stands in it has begun it; None if that is not known any more."""
    waiting: list[int]
    missing: list[int]
    """Members that never began it."""
    untold: list[int]
    """Members whose position is unknown."""

    def text(self, world_size: int) -> str:
        """`all_reduce`, `all_reduce of group 1 (ranks 4-7)`, `send to rank 1`"""
        name = self.operation.operation if self.operation is not None and self.operation.operation else "a collective"
        if self.number < 0 and self.operation is None:  # torch has refused it
            return "a send or a receive"
        if self.number < 0 and self.operation is not None:
            whom = f"rank {self.peer}" if self.peer is not None else "any rank"
            return f"{name} {'to' if name == 'send' else 'from'} {whom}"
        return name + group_text(self.group, self.members, world_size)

    @property
    def peer(self) -> int | None:
        """The rank that it sends to or receives from; None if it is a collective, or any rank will do."""
        at = self.operation.peer if self.operation is not None else -1
        return self.members[at] if self.number < 0 and 0 <= at < len(self.members) else None


def group_text(name: str, members: Sequence[int], world_size: int) -> str:
    """` of group 1 (ranks 4-7)`; "" for the default group, which torch calls 0."""
    if len(members) < world_size:
        return f" of group {name} ({ranks_text(list(members))})"
    return f" of group {name} (all ranks)" if name != "0" else ""


def kind_text(kind: IssuedKind) -> str:
    """`all_reduce of 8 elements of float32`, `broadcast from the group's rank 0 of 3 elements of float32`"""
    operation, dtype, elements, root = kind
    text = operation
    if root >= 0:
        text += f" {'from' if operation in ('broadcast', 'scatter') else 'to'} the group's rank {root}"
    if elements >= 0:
        text += f" of {elements} element{'' if elements == 1 else 's'}"
    return text + (f" of {dtype}" if dtype else "")


def is_pending(groups: Iterable[GroupState]) -> bool:
    """Whether a rank's device waits for other ranks."""
    return any(group.pending for group in groups)


def left_open(
    groups: Iterable[GroupState], tables: Mapping[int, Sequence[GroupState]], world_size: int
) -> tuple[GroupState, int] | None:
    """The collective of C++'s, such as DDP's, in which a waiting rank stands: the first that it has begun and another
    member has not. The table shows no end of these."""
    found = [(group, number) for group in groups if (number := _first_open(group, "issued", tables, world_size))]
    return min(found, key=lambda place: place[0].since_s, default=None)


def with_pending(tables: Mapping[int, Sequence[GroupState]], world_size: int) -> Mapping[int, Sequence[GroupState]]:
    """Add what a device cannot have completed where torch's recorder shows nothing, as with the backend nccl2.

    A device takes the collectives of a group in their order. All ranks' tables must note what C++ issues.
    """
    on_device = {(group.name, group.members) for groups in tables.values() for group in groups if group.phase == _GIVEN}
    if not on_device:
        return tables

    def seen(group: GroupState) -> GroupState:
        if group.pending is not None or (group.name, group.members) not in on_device:
            return group
        number = _first_open(group, _GIVEN, tables, world_size)
        return replace(group, pending=number, pending_s=group.since_s if number else 0.0)

    return {rank: [seen(group) for group in groups] for rank, groups in tables.items()}


_GIVEN = "on_device"


def _first_open(group: GroupState, phase: str, tables: Mapping[int, Sequence[GroupState]], world_size: int) -> int:
    """The first collective that the rank has begun and another member has not; 0 if there is none."""
    if group.phase != phase or group.pending is not None:
        return 0
    # nothing is known of a rank without a table
    counts = [begun_in(tables[rank], group) for rank in members_of(group.members, world_size) if tables.get(rank)]
    first = 1 + min((begun for begun in counts if begun is not None), default=group.begun)
    return first if first <= group.begun else 0


def meetings_of(
    tables: Mapping[int, Sequence[GroupState]], places: Mapping[int, tuple[GroupState, int]], world_size: int
) -> list[PendingOperation]:
    """The operations in which the ranks of `places` stand. `tables` has what each rank shows that is known."""
    found: dict[tuple[object, ...], PendingOperation] = {}
    for rank, (state, number) in sorted(places.items()):
        members = tuple(members_of(state.members, world_size))
        # each send and each receive is a meeting of its own
        key = (state.name, members, number, rank if number < 0 else None)
        if key in found:
            found[key].waiting.append(rank)
            continue
        meeting = found[key] = PendingOperation(
            state.name, members, number, operation_at(state, number), [rank], [], []
        )
        if number < 0:
            _add_peer(meeting, rank, state, places)
            continue
        for member in members:
            begun = begun_in(tables[member], state) if member in tables else None
            if begun is None:
                meeting.untold.append(member)
            elif begun < number:
                meeting.missing.append(member)
    return list(found.values())


def operation_at(state: GroupState, number: int) -> IssuedOperation | None:
    """The operation that a rank has begun under a number of a group; None if its table does not show it any more."""
    return next((issued for issued in state.recent if issued.number == number), None)


def _add_peer(
    meeting: PendingOperation, rank: int, state: GroupState, places: Mapping[int, tuple[GroupState, int]]
) -> None:
    """The peer of a send or a receive is missing, unless it stands in the other half of it."""
    peer, members = meeting.peer, meeting.members
    if peer is None or meeting.operation is None:
        meeting.untold.extend(member for member in members if member != rank)
        return
    there, number = places.get(peer, (None, 0))
    other = operation_at(there, number) if there is not None else None
    matches = (
        there is not None
        and other is not None
        and (there.name, there.members) == (state.name, state.members)
        and {other.operation, meeting.operation.operation} == {"send", "recv"}
        and (other.peer < 0 or (other.peer < len(members) and members[other.peer] == rank))
    )
    if not matches:
        meeting.missing.append(peer)


def begun_in(groups: Sequence[GroupState], like: GroupState) -> int | None:
    """Number of the last collective that a rank with these groups has begun in the group `like`.

    None where it is not known: the rank may have more groups than its table has room for (that of an earlier version).
    """
    state = group_in(groups, like.name, like.members)
    if state is None:
        return None if len(groups) >= EARLIER_GROUPS else 0
    return state.begun
