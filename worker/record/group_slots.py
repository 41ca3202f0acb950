"""Writes what this rank does in its process groups into its recorder: see core/recorder/group_table.py.

Where worker/native was built, its GroupWriter writes the operations, and this writes who holds a slot.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from ...core.events.alarms import NotedCollective
from ...core.recorder import group_table as table
from ...core.recorder.group_table import GroupField, GroupPhase
from ...core.recorder.layout import GROUP_BYTES, GROUPS, GROUPS_AT, HeadField
from ...core.recorder.writer import RecorderWriter
from ...core.signal_errors import from_outside, suppress_own
from ..answers import answer_about_nccl
from .float_formats import CODES
from .group_messages import MOST_PENDING, NO_MESSAGE, GroupMessages, GroupSlot, PeerCounts
from .group_timeouts import timeout_ms

_modules = sys.modules
_now = time.monotonic_ns
_pack_operation, _what_of = table.OPERATION.pack_into, table.what_of
_RECENT_AT, _OPERATION_BYTES = table.RECENT_AT, table.OPERATION_BYTES
_ISSUING, _WAITING = int(GroupPhase.ISSUING), int(GroupPhase.WAITING)
_P2P, _RING_MASK, _AT = int(GroupField.P2P), table.RECENT - 1, int(GroupField.AT)
_BEGUN, _STATE, _ENDED = int(GroupField.BEGUN), int(GroupField.STATE), int(GroupField.ENDED)
_COUNTED, _SINCE, _WAITED = int(GroupField.COUNTED), int(GroupField.SINCE_NS), int(HeadField.WAITED_NS)
_AFTER = int(GroupField.AFTER)


class GroupCall(IntEnum):
    """The kind of a method of a process group, or of a work."""

    COLLECTIVE = 0
    P2P = 1
    BARRIER = 2
    """A collective that has ended when the call returns, and that the group's own counter counts by its messages."""
    WAIT = 3
    BLOCK = 4
    """A wait of the current stream: the host goes on."""


@dataclass
class OperationPlace:
    """An operation that has begun."""

    slot: GroupSlot
    number: int
    message: int = NO_MESSAGE
    """The result of `GroupMessages.begun`."""
    operation: int = 0
    root: int = -1
    given: tuple[int, int] = (-1, 0)
    """passed.Look"""
    late: Any = None
    """The result of LatePassed.read for the inputs."""
    outputs: list[weakref.ref[Any]] = field(default_factory=list)
    """Those of its output tensors that can be read."""
    before: tuple[int, int] = (0, 0)
    """Of a message: what the slot had of the one before it (P2P_WHAT, P2P_ELEMENTS)."""
    is_counted: bool = False
    """Of a message: GroupMessages has counted it."""


def described(tensor: Any) -> tuple[int, int]:
    """Code of a tensor's dtype, and its elements; (0, 0) for None."""
    return (CODES.get(tensor.dtype, 0), tensor.numel()) if tensor is not None else (0, 0)


class GroupTable:
    """This rank's process groups."""

    def __init__(self, recorder: RecorderWriter) -> None:
        self._folder = Path(recorder.path).parent
        self._view = recorder.view
        self.fields = self._header = recorder.fields
        self._fields = recorder.groups
        self._pid = os.getpid()
        self._slots: dict[int, GroupSlot | None] = {}
        """by id of the group; None: it found no slot, or its backend counts nothing"""
        self.memory = recorder.memory
        self.shows = False
        """Whether operations are noted. Else the table stays empty: a number that does not move would be wrong."""
        self.sees_all = False
        """Whether torch calls hooks for what C++ issues: else that is counted late."""
        self.native: Any = None
        """The GroupWriter; None if the methods below write the operations."""
        self._pending: dict[int, tuple[Any, OperationPlace]] = {}
        """id of a work -> (weak reference, place)"""
        self.threads_inside: set[int] = set()
        """Those in a replaced method, where the methods below write: what torch issues meanwhile is the method's."""
        self.messages = GroupMessages()
        self._beside: dict[str, int] = {}
        """Name of a group -> count of its own counter that was no collective, when the table was cleared."""
        self._failed = False

    def count_of(self, group: Any) -> int:
        """How many collectives were issued on a group; -1 if unknown. Sends and receives do not count.

        Raises RuntimeError if the group's backend has no counter.
        """
        counted = int(group._get_sequence_number_for_group())
        if self._failed:
            return -1
        if not self.shows:
            return counted - self._beside.get(str(group.group_name), 0)
        slot = self.slot_of(group)
        if slot is None:
            return -1
        fields, field = self._fields, slot.field
        return int(fields[field + _BEGUN]) + max(0, counted - int(fields[field + _COUNTED]))

    def last_collectives(self) -> list[NotedCollective]:
        """The last ones on each group that is shown."""
        if not self.shows or self._failed:
            return []
        data = bytes(self._view[GROUPS_AT : GROUPS_AT + GROUPS * GROUP_BYTES])
        on_device = {slot.name for slot in self._slots.values() if slot is not None and self._ends_on_device(slot)}
        return [
            NotedCollective(
                group.name, each.number, each.operation, each.dtype, each.took_ns > 0 or group.name in on_device
            )
            for group in table.read_groups(data, _now())
            for each in group.recent
            if each.number > 0
        ]

    def _ends_on_device(self, slot: GroupSlot) -> bool:
        return bool(self._fields[slot.field + _ENDED] == table.ENDS_ON_DEVICE)

    def slot_at(self, number: int) -> GroupSlot | None:
        """The slot of that number, if a group holds it."""
        return next((slot for slot in self._slots.values() if slot is not None and slot.number == number), None)

    def messages_by_peer(self) -> tuple[PeerCounts, PeerCounts]:
        """(sends begun, receives that have ended)."""
        slots = {slot.number: slot for slot in self._slots.values() if slot is not None}
        return self.messages.by_peer(slots)

    def clear(self, failed: bool = False) -> None:
        """Clear the table. A forked process leaves the table as it is: it belongs to the parent.

        `failed`: this rank continues to communicate, but its collectives are no longer distinguished from messages.
        """
        self._failed = self._failed or failed
        if self.shows and not self._failed:
            self._beside = self._counted_beside()
        self.shows = False
        self._slots = {}
        self._pending = {}
        if self.native is not None:
            self.native.forget()
        # The mapping is shared (MAP_SHARED): a forked child that cleared the table would clear its parent's. So the
        # child forgets its own dictionaries, which fork has copied, and writes nothing. A spawned child has a new
        # interpreter and never has this object (docs.python.org/3/library/multiprocessing.html, Contexts and start
        # methods).
        if os.getpid() == self._pid:
            with suppress_own(ValueError):  # the recorder is closed
                for slot in range(GROUPS):
                    self._fields[slot * GROUP_BYTES // 8] = 0

    def notice(self) -> None:
        """Enter groups that were made meanwhile, and count the operations that torch has issued on all groups."""
        module = _modules.get("torch.distributed.distributed_c10d")
        if module is None or not self.shows:
            return
        for group in module._pg_map:
            slot = self.slot_of(group)
            if slot is not None:
                self._count_unseen(slot, group)

    def got_backend(self, group: Any) -> None:
        """A new group has a backend: note the default group's timeout, as the rank may wait in it from now on."""
        module = _modules.get("torch.distributed.distributed_c10d")
        if module is not None and self.shows and module._world.default_pg is None:
            self._header[HeadField.GROUP_TIMEOUT_MS] = timeout_ms(group)

    def slot_of(self, group: Any) -> GroupSlot | None:
        """A group's slot. A new group gets a free one, if there is one."""
        key = id(group)
        slot = self._slots.get(key)
        # an id may be a new group's once the old one is destroyed
        if key in self._slots and (slot is None or slot.group() is group):
            return slot
        if not self.shows:
            return None
        used = {slot.field: slot for slot in self._slots.values() if slot is not None and slot.group() is not None}
        number = next((n for n in range(GROUPS) if n * GROUP_BYTES // 8 not in used), None)
        self._slots = {k: s for k, s in self._slots.items() if s is None or s.field in used}
        self._slots[key] = None
        if number is not None:
            slot = GroupSlot(group, number)
            self.messages.forget(number)
            try:
                self._write_slot(slot, group)
            except RuntimeError as error:  # a backend without the counter
                if from_outside(error):
                    raise
                number = None
        if number is None:
            self._header[HeadField.GROUPS_NOT_SHOWN] += 1
            return None
        self._slots[key] = slot
        if self.native is not None:
            self.native.enter(number, group)
        return slot

    # -- what worker/native/group_writer.c does likewise --------------------------------------------------------
    #
    # A signal's handler may raise, or communicate, when a call has returned and where a function begins: so what must
    # fit together is written without a call in between (see core/recorder/writer.py).

    def begin(
        self, group: Any, operation: int, tensor: Any, root: int = -1, begun: list[OperationPlace | None] | None = None
    ) -> OperationPlace | None:
        """A collective begins. Returns its slot and number; None if the group is not shown.

        `begun` gets the same as its last item in the moment in which it is counted: see `take_back`.
        """
        slot = self._slots.get(id(group))
        if slot is None or slot.group() is not group:
            slot = self.slot_of(group)
            if slot is None:
                return None
        fields, field = self._fields, slot.field
        dtype, elements = described(tensor)
        what, now = _what_of(operation, dtype, root), _now()
        begun = [None] if begun is None else begun
        while True:
            # The group's own counter also counts what C++ has issued since this table last looked: those come before
            # this one. The call that follows raises it by one, which `_COUNTED` has already.
            before = fields[field + _BEGUN]
            counted = group._get_sequence_number_for_group()
            number = before + 1 + max(0, counted - fields[field + _COUNTED])
            # one that has begun and is not issued yet, in another thread or where a handler has interrupted it, is
            # counted here and not there
            noted = max(counted, fields[field + _COUNTED]) + 1
            place = OperationPlace(slot, number, operation=operation, root=root)
            # first the operation, then the number that leads a reader of the other process to it
            at = slot.at + _RECENT_AT + _OPERATION_BYTES * (number & _RING_MASK)
            _pack_operation(self._view, at, number, what, elements, now, 0)
            if fields[field + _BEGUN] == before:  # no handler has begun another one: without a call from here on
                fields[field + _COUNTED] = noted
                fields[field + _BEGUN] = fields[field + _AT] = number
                fields[field + _SINCE] = now
                fields[field + _STATE] = _ISSUING
                begun[-1] = place
                return place

    def take_back(self, place: OperationPlace) -> None:
        """A signal's handler has raised before the operation was issued: the other ranks do not count it either."""
        fields, field = self._fields, place.slot.field
        if place.number > 0:
            fields[field + _BEGUN] -= 1
            fields[field + _COUNTED] -= 1
        else:
            self._take_back_message(place)
        fields[field + _STATE] = fields[field + _AFTER]

    def _take_back_message(self, place: OperationPlace) -> None:
        fields, field = self._fields, place.slot.field
        if fields[field + _P2P] == -place.number:
            fields[field + _P2P + 1], fields[field + _P2P + 2] = place.before
        fields[field + _P2P] -= 1
        if place.is_counted:
            self.messages.take_back(place.slot.number, place.message)

    def failed(self, place: OperationPlace, group: Any, is_refused: bool) -> None:
        """The call that begins an operation has raised. `is_refused`: the error is torch's, and no signal's handler's.

        What torch has refused is not counted by the other ranks either. The group's own counter tells of a collective;
        it tells nothing of a message, as not every backend counts those.
        """
        self.leave_phase(place, GroupPhase.FAILED)
        fields, field = self._fields, place.slot.field
        if is_refused and place.number < 0:
            self._take_back_message(place)
        counted = group._get_sequence_number_for_group()
        if is_refused and place.number > 0 and counted < fields[field + _COUNTED]:
            fields[field + _BEGUN] -= 1
        fields[field + _COUNTED] = counted

    def begin_p2p(
        self,
        group: Any,
        operation: int,
        tensor: Any,
        peer: int,
        tag: int = 0,
        begun: list[OperationPlace | None] | None = None,
    ) -> OperationPlace | None:
        """A send or a receive begins. `begun`: see `begin`."""
        slot = self.slot_of(group)
        if slot is None:
            return None
        self._count_unseen(slot, group)
        fields, field = self._fields, slot.field
        dtype, elements = described(tensor)
        what, now = _what_of(operation, dtype, peer), _now()
        begun = [None] if begun is None else begun
        place = OperationPlace(slot, 0, operation=operation)
        number = fields[field + _P2P] + 1  # without a call from here on
        place.number, place.before = -number, (fields[field + _P2P + 1], fields[field + _P2P + 2])
        fields[field + _P2P] = number
        fields[field + _P2P + 1], fields[field + _P2P + 2] = what, elements
        fields[field + _AT] = -number
        fields[field + _SINCE] = now
        fields[field + _STATE] = _ISSUING
        begun[-1] = place
        self.messages.begun(slot.number, operation, peer, tag, place)
        return place

    def waits_for(self, work: Any) -> OperationPlace | None:
        """The rank begins to wait for a work. None if it is not known which one that is."""
        entry = self._pending.pop(id(work), None)
        # a work that was freed unwaited leaves its id to the next one
        if entry is None or entry[0]() is not work:
            return None
        place = entry[1]
        slot = place.slot
        fields, field, now = self._fields, slot.field, _now()
        fields[field + _AT] = place.number
        fields[field + _SINCE] = now
        fields[field + _STATE] = _WAITING
        return place

    def issued(self, place: OperationPlace, work: Any) -> None:
        """The call that began an operation has returned `work`, which the script may wait for."""
        self._fields[place.slot.field + _STATE] = self._fields[place.slot.field + _AFTER]
        if work is not None:
            pending = self._pending
            if len(pending) > MOST_PENDING:
                self._pending = pending = {}
            # weak: the script may drop a work without a wait for it
            pending[id(work)] = weakref.ref(work), place

    def ended(self, place: OperationPlace, on_host: bool = True) -> None:
        """The wait has ended on this rank, as far as the host can see; or a stream waits, and not the host."""
        at = place.slot.field
        fields = self._fields
        now = _now()
        self._header[_WAITED] += now - fields[at + _SINCE]
        fields[at + _STATE] = fields[at + _AFTER]
        if on_host and place.number > 0 and fields[at + _ENDED] >= 0:  # below 0: the device ends them
            recent = at + (_RECENT_AT + _OPERATION_BYTES * (place.number & _RING_MASK)) // 8
            # the ring holds the last few operations: a later one may have this entry by now
            if fields[recent] == place.number:
                fields[recent + 4] = now - fields[recent + 3]
            fields[at + _ENDED] = max(fields[at + _ENDED], place.number)
        if place.message != NO_MESSAGE:
            self.messages.waited_for(place.slot.number, place.message)

    def leave_phase(self, place: OperationPlace, phase: GroupPhase) -> None:
        """The call or the wait has raised; or C++ has issued it, and nobody shows its end."""
        after = self._fields[place.slot.field + _AFTER]
        self._fields[place.slot.field + _STATE] = after if after and phase == GroupPhase.ISSUED else phase

    def count_again(self, place: OperationPlace, group: Any) -> None:
        """Read the group's own counter again: it may count operations or messages that are no collectives."""
        self._fields[place.slot.field + _COUNTED] = group._get_sequence_number_for_group()

    # -- messages in bundles ------------------------------------------------------------------------------------

    def bundle_begun(self, group: Any) -> None:
        """The messages that begin now on this group share one work, as with `batch_isend_irecv` on NCCL."""
        slot = self.slot_of(group)
        if slot is not None:
            self.messages.bundle_begun(slot.number)

    def bundle_ended(self, group: Any, work: Any) -> None:
        """`work` is the one that the script waits for."""
        slot = self.slot_of(group)
        bundle = self.messages.bundle_ended(slot.number, work is not None) if slot is not None else NO_MESSAGE
        if slot is None or bundle == NO_MESSAGE:
            return
        number = -int(self._fields[slot.field + _P2P])
        if self.native is not None:
            self.native.remember(slot.number, work, number, bundle)
        else:
            self.issued(OperationPlace(slot, number, bundle), work)

    # -- slots --------------------------------------------------------------------------------------------------

    def _write_slot(self, slot: GroupSlot, group: Any) -> None:
        self._view[slot.at : slot.at + GROUP_BYTES] = bytes(GROUP_BYTES)
        module = _modules["torch.distributed.distributed_c10d"]
        places = module._world.pg_group_ranks.get(group, {})
        ranks = [int(rank) for rank in places]
        # torch has the rank in the job -> the rank in the group
        slot.ranks = [int(rank) for rank in sorted(places, key=places.__getitem__)]
        self._write_text(slot.at + table.NAME_AT, table.NAME_BYTES, str(group.group_name))
        slot.members = table.members_text(sorted(ranks))
        self._write_text(slot.at + table.MEMBERS_AT, table.MEMBERS_BYTES, slot.members)
        self._fields[slot.field + GroupField.SIZE] = group.size()
        self._fields[slot.field + GroupField.TIMEOUT_MS] = timeout_ms(group)
        if "nccl" in str(module._world.pg_map.get(group, ("",))[0]):  # a host does not wait for its device
            self._fields[slot.field + GroupField.ENDED] = table.ENDS_ON_DEVICE
            self._fields[slot.field + GroupField.AFTER] = GroupPhase.ON_DEVICE if self.sees_all else GroupPhase.NONE
            answer_about_nccl(self._folder, self._header[HeadField.RANK], self._header[HeadField.ATTEMPT])
        self._count_unseen(slot, group)
        # last: the agent reads the slot from then on
        self._fields[slot.field + GroupField.USED] = 1

    def _counted_beside(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for slot in self._slots.values():
            group = slot.group() if slot is not None else None
            if slot is not None and group is not None:
                with suppress_own(RuntimeError, ValueError):  # the group is destroyed, the recorder closed
                    found[slot.name] = int(group._get_sequence_number_for_group()) - self.count_of(group)
        return found

    def _write_text(self, at: int, most: int, text: str) -> None:
        data = text.encode("utf-8", "replace")[:most]
        self._view[at : at + len(data)] = data

    def _count_unseen(self, slot: GroupSlot, group: Any) -> None:
        """Count the operations that torch has issued without Python."""
        fields, field = self._fields, slot.field
        before = fields[field + _BEGUN]
        counted = group._get_sequence_number_for_group()
        if fields[field + _BEGUN] != before:  # a handler has begun some meanwhile, and counted those as well
            return
        unseen = counted - fields[field + _COUNTED]
        # below 0 is what `begin` has counted in advance, of a call that has not come to its end
        if unseen > 0:
            fields[field + _BEGUN] += unseen
            fields[field + _COUNTED] = counted
