"""The operations that this rank has issued on its process groups: the only clock that ranks share.

`issued` counts all operations, sends and receives too. If it grew between two places on this rank, a value may have
arrived from another rank. It is a sum and does not order two ranks. For that, each of its values has a moment: the
collectives on each group, and the messages to and from each peer.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...core.events import IssuedMoment, RunPosition
from ...core.recorder.group_table import OPERATIONS
from ...core.signal_errors import from_outside

if TYPE_CHECKING:
    from .group_slots import GroupSlot, GroupTable

_modules = sys.modules
_MOST_MOMENTS = 2048


class _MomentHistory:
    """The moments of this process, and the counters that they are made from."""

    def __init__(self) -> None:
        self.seq = -1
        """The last result of `issued`."""
        self.groups = 0
        """The number of groups then."""
        self.moments: deque[IssuedMoment] = deque(maxlen=_MOST_MOMENTS)
        self.table: Callable[[], GroupTable | None] = lambda: None
        self.silent: dict[int, weakref.ref[Any]] = {}
        """Groups whose backend has no counter, by id: torch's `fake`."""


_history = _MomentHistory()


def count_with(table: GroupTable) -> None:
    """Use `table` from now on to distinguish collectives from messages."""
    _history.table = weakref.ref(table)


def count_issued() -> int:
    """Number of operations issued on all process groups that count; -1 if there is none. Takes about 0.2 us a group.

    Each group counts its own (`ProcessGroup._get_sequence_number_for_group`), including the bucket reductions of DDP.
    A receive counts once more when it has ended.
    """
    module = _modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return -1
    history = _history
    try:
        groups = module._pg_map  # as `_world.pg_map`, without the call of a property
        if not groups:
            return -1
        number = len(groups)
        table = history.table()
        total = table.messages.received if table is not None else 0
        if history.silent:
            groups = _counting(groups)
            if not groups:
                return -1
        for group in groups:
            total += group._get_sequence_number_for_group()
    except Exception as error:
        if from_outside(error):
            raise
        return count_issued() if _leave_out_silent() else -1
    if total != history.seq or number != history.groups:
        history.seq, history.groups = total, number
        sent, received = table.messages_by_peer() if table is not None else ({}, {})
        history.moments.append(IssuedMoment(total, clock(), sent, received))
    return int(total)


issued: Callable[[], int] = count_issued
"""As `count_issued`."""
try:
    from ..native.core import IssuedCounter
except ImportError:  # gpuwatch was installed without a C compiler
    pass
else:  # it runs no bytecode, at which a signal's handler could raise, unless something was issued
    issued = IssuedCounter(_history, count_issued)


def clock() -> dict[str, int]:
    """Name of a process group -> collectives issued on it; -1: it counts nothing. All members use the same name."""
    module = _modules.get("torch.distributed.distributed_c10d")
    if module is None or module.GroupMember.WORLD is None:
        return {}
    try:
        return {str(group.group_name): _count_of(group) for group in module._pg_map}
    except Exception as error:  # another thread makes a group
        if from_outside(error):
            raise
        return {}


def moment(seq: int) -> IssuedMoment:
    """The counts when `issued` returned `seq`; without counts if they are not kept any more."""
    found = next((one for one in reversed(_history.moments) if one.seq == seq), None)
    return found if found is not None else IssuedMoment(seq)


def position(
    seq: int, rank: int, attempt: int, step: int = 0, batch: int = -1, root: str = "", page: int = -1
) -> RunPosition:
    """A place in the run, with what had been issued when `issued` returned `seq`. Its time is now."""
    then = moment(seq)
    return RunPosition(
        rank, attempt, step, batch, root, page, seq, time.time_ns(), then.clock, then.sent, then.received
    )


def moments(most: int, until: int) -> list[IssuedMoment]:
    """The last moments before `issued` returned `until`, the latest last."""
    earlier = (one for one in reversed(_history.moments) if one.seq < until)
    return list(islice(earlier, most))[::-1]


def ranks() -> int:
    """Size of the default process group; 1 if there is none."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or module.GroupMember.WORLD is None:
        return 1
    return int(module.GroupMember.WORLD.size())


def _count_of(group: Any) -> int:
    table = _history.table()
    try:
        return table.count_of(group) if table is not None else int(group._get_sequence_number_for_group())
    except RuntimeError as error:  # its backend has no counter
        if from_outside(error):
            raise
        return -1


def _counting(groups: Iterable[Any]) -> list[Any]:
    silent = _history.silent
    return [group for group in groups if (ref := silent.get(id(group))) is None or ref() is not group]


def _leave_out_silent() -> bool:
    """Whether a group was found that has no counter, and was not known to have none."""
    silent = _history.silent
    found = False
    try:
        for group in _counting(_modules["torch.distributed.distributed_c10d"]._pg_map):
            try:
                group._get_sequence_number_for_group()
            except RuntimeError as error:
                if from_outside(error):
                    raise
                silent[id(group)] = weakref.ref(group)
                found = True
    except Exception as error:  # another thread makes a group
        if from_outside(error):
            raise
        return False
    return found


PeerCounts = dict[str, dict[int, int]]
"""Name of a group -> rank of the peer in the job (ANYONE: it is not known) -> how many messages."""
ANYONE = -1
NO_MESSAGE = -1
MOST_PENDING = 1024
"""The most operations that are kept until the script waits for them; beyond that the oldest are dropped."""
_SEND = OPERATIONS.index("send")


def message_of(message: int) -> tuple[int, int, int]:
    """(number, rank of the peer in the group or ANYONE, tag) of a result of `GroupMessages.begun`."""
    return message >> 41, (message >> 1 & 0xF_FFFF) - 1, message >> 21 & 0xF_FFFF


@dataclass
class _MessageBundle:
    messages: list[int] = field(default_factory=list)
    outputs: list[tuple[Any, ...]] = field(default_factory=list)
    """Those that are written when the script has waited for the bundle."""


class GroupMessages:
    """The sends and receives of this rank. `slot` is a group's number in the table of groups.

    worker/native/group_writer.c calls `begun` and `waited_for` as well.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], int] = {}
        """(slot, rank of the group) -> sends begun"""
        self._begun: dict[tuple[int, int, int, bool], int] = {}
        """(slot, rank of the group, tag, whether it is sent) -> how many were begun"""
        self._received: dict[tuple[int, int], int] = {}
        """(slot, rank of the group) -> receives that have ended"""
        self._open: dict[int, _MessageBundle] = {}
        """Slot -> the bundle that it has begun."""
        self._bundles: dict[int, _MessageBundle] = {}
        """Result of `bundle_ended` -> a bundle that the script may wait for."""
        self._last_bundle = NO_MESSAGE
        self.on_bundle: Callable[[tuple[Any, ...]], None] | None = None
        """Called with each of these outputs."""
        self.received = 0
        """Receives that have ended, in all groups that this process has been in."""

    def by_peer(self, slots: Mapping[int, GroupSlot]) -> tuple[PeerCounts, PeerCounts]:
        """(sends begun, receives that have ended) of the groups in these slots."""
        found: tuple[PeerCounts, PeerCounts] = {}, {}
        for counts, named in zip((self._sent, self._received), found, strict=True):
            for (number, member), count in counts.items():
                slot = slots.get(number)
                if slot is not None:
                    named.setdefault(slot.name, {})[slot.member(member)] = count
        return found

    def forget(self, slot: int) -> None:
        """Another group has this slot now."""
        self._sent, self._received = (
            {key: count for key, count in counts.items() if key[0] != slot} for counts in (self._sent, self._received)
        )
        self._begun = {key: count for key, count in self._begun.items() if key[0] != slot}

    def begun(self, slot: int, operation: int, peer: int, tag: int) -> int:
        """Count a message. Returns an integer for `message_of` and `waited_for`."""
        is_sent, tag = operation == _SEND, tag & 0xF_FFFF
        bundle = self._open.get(slot)
        key = slot, peer, tag, is_sent
        number = self._begun[key] = self._begun.get(key, 0) + 1
        if is_sent:
            self._sent[slot, peer] = self._sent.get((slot, peer), 0) + 1
        message = (number & 0x3F_FFFF) << 41 | tag << 21 | (peer + 1 & 0xF_FFFF) << 1 | is_sent
        if bundle is None:
            return message
        bundle.messages.append(message)  # the script cannot wait for it alone
        return NO_MESSAGE

    def waited_for(self, slot: int, message: int) -> None:
        """Count received messages, after the script has waited for a message or a bundle."""
        if message < NO_MESSAGE:
            bundle = self._bundles.pop(message, _MessageBundle())
            for one in bundle.messages:
                self.waited_for(slot, one)
            if self.on_bundle is not None:
                for outputs in bundle.outputs:
                    self.on_bundle(outputs)
            return
        if message & 1:
            return
        self.received += 1
        _, source, _ = message_of(message)
        if source != ANYONE:
            self._received[slot, source] = self._received.get((slot, source), 0) + 1

    def bundle_begun(self, slot: int) -> None:
        """The messages that begin now have one work for all."""
        self._open[slot] = _MessageBundle()

    def last_in_bundle(self, slot: int) -> int:
        """The message of the bundle that was begun last; NO_MESSAGE if there is none."""
        bundle = self._open.get(slot)
        return bundle.messages[-1] if bundle is not None and bundle.messages else NO_MESSAGE

    def keep_in_bundle(self, slot: int, outputs: tuple[Any, ...]) -> bool:
        """Call `on_bundle` with this once the script has waited for the bundle. False if there is none."""
        if slot not in self._open:
            return False
        self._open[slot].outputs.append(outputs)
        return True

    def bundle_ended(self, slot: int, has_work: bool) -> int:
        """Returns an integer for `waited_for`; NO_MESSAGE if there is nothing to wait for."""
        bundle = self._open.pop(slot, None)
        if bundle is None or not (bundle.messages or bundle.outputs) or not has_work:
            return NO_MESSAGE
        self._last_bundle -= 1
        self._bundles[self._last_bundle] = bundle
        if len(self._bundles) > MOST_PENDING:
            del self._bundles[next(iter(self._bundles))]
        return self._last_bundle
