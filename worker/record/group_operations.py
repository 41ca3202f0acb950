"""Writes what this rank does in its process groups into its recorder: see core/recorder/group_table.py.

Where worker/native was built, its GroupWriter writes the operations, and group_slots.py who holds a slot.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

from ...core.recorder import group_table as table
from ...core.recorder.group_table import GroupField, GroupPhase
from ...core.recorder.layout import HeadField
from .group_messages import MOST_PENDING, NO_MESSAGE
from .group_slots import HeldSlots
from .operation_place import OperationPlace, described

_now = time.monotonic_ns
_pack_operation, _what_of = table.OPERATION.pack_into, table.what_of
_RECENT_AT, _OPERATION_BYTES = table.RECENT_AT, table.OPERATION_BYTES
_ISSUING, _WAITING = int(GroupPhase.ISSUING), int(GroupPhase.WAITING)
_P2P, _RING_MASK, _AT = int(GroupField.P2P), table.RECENT - 1, int(GroupField.AT)
_BEGUN, _STATE, _ENDED = int(GroupField.BEGUN), int(GroupField.STATE), int(GroupField.ENDED)
_COUNTED, _SINCE, _WAITED = int(GroupField.COUNTED), int(GroupField.SINCE_NS), int(HeadField.WAITED_NS)
_AFTER = int(GroupField.AFTER)


class GroupTable(HeldSlots):
    """This rank's process groups."""

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
