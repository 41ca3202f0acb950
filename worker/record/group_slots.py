"""Which process groups hold the slots of the table in the recorder (core/recorder/group_table.py)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from ...core.events.alarms import NotedCollective
from ...core.recorder import group_table as table
from ...core.recorder.group_table import GroupField, GroupPhase
from ...core.recorder.layout import GROUP_BYTES, GROUPS, GROUPS_AT, HeadField
from ...core.recorder.writer import RecorderWriter
from ...core.signal_errors import from_outside, suppress_own
from ..answers import answer_about_nccl
from .group_messages import GroupMessages, GroupSlot, PeerCounts
from .group_timeouts import timeout_ms
from .operation_place import OperationPlace

_modules = sys.modules
_BEGUN, _ENDED, _COUNTED = int(GroupField.BEGUN), int(GroupField.ENDED), int(GroupField.COUNTED)


class HeldSlots:
    """The part of a GroupTable that gives a process group its slot, and counts what torch issued without Python."""

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
        """The GroupWriter; None if GroupTable writes the operations."""
        self._pending: dict[int, tuple[Any, OperationPlace]] = {}
        """id of a work -> (weak reference, place)"""
        self.threads_inside: set[int] = set()
        """Those in a replaced method, where GroupTable writes: what torch issues meanwhile is the method's."""
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
            for group in table.read_groups(data, time.monotonic_ns())
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
