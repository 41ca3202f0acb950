"""A group's place in the table of groups, and the messages between its members."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...core.recorder.group_table import OPERATIONS
from ...core.recorder.layout import GROUP_BYTES, GROUPS_AT

PeerCounts = dict[str, dict[int, int]]
"""Name of a group -> rank of the peer in the job (ANYONE: it is not known) -> how many messages."""
ANYONE = -1
NO_MESSAGE = -1
MOST_PENDING = 1024
"""The most operations that are kept until the script waits for them; beyond that the oldest are dropped."""
_SEND = OPERATIONS.index("send")


class GroupSlot:
    """One group's place in the table."""

    __slots__ = ("at", "field", "group", "members", "name", "number", "ranks")

    def __init__(self, group: Any, number: int) -> None:
        self.group = weakref.ref(group)
        self.at = GROUPS_AT + number * GROUP_BYTES
        """Offset in the recorder, in bytes."""
        self.field = number * GROUP_BYTES // 8
        """The same in the table's integers."""
        self.number = number
        self.name = str(group.group_name)
        self.ranks: list[int] = []
        """The members, in the order of their ranks within the group."""
        self.members = ""
        """The same as text, sorted."""

    def member(self, number: int) -> int:
        """Rank in the job of a rank of the group; -1 if it is not known."""
        return self.ranks[number] if 0 <= number < len(self.ranks) else ANYONE


def message_of(message: int) -> tuple[int, int, int]:
    """(number, rank of the peer in the group or ANYONE, tag) of a result of `GroupMessages.begun`."""
    return message >> 41, (message >> 1 & 0xF_FFFF) - 1, message >> 21 & 0xF_FFFF


class CountedMessage(Protocol):
    """What is told that its message was counted."""

    message: int
    is_counted: bool


@dataclass
class _MessageBundle:
    messages: list[int] = field(default_factory=list)
    outputs: list[tuple[Any, ...]] = field(default_factory=list)
    """Those that are written when the script has waited for the bundle."""


class GroupMessages:
    """The sends and receives of this rank. `slot` is a group's number in the table of groups.

    worker/native/group_writer.c calls `begun`, `take_back` and `waited_for` as well.
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

    def begun(self, slot: int, operation: int, peer: int, tag: int, place: CountedMessage | None = None) -> int:
        """Count a message. Returns an integer for `message_of` and `waited_for`. If it raises, nothing was counted.

        `place` gets the same in the moment in which the message is counted.
        """
        # without a call: a signal's handler may raise, or communicate, when one has returned
        is_sent, tag = operation == _SEND, tag & 0xF_FFFF
        key, to = (slot, peer, tag, is_sent), (slot, peer)
        number = self._begun[key] = (self._begun[key] if key in self._begun else 0) + 1  # noqa: SIM401  # `get` is a call
        if is_sent:
            self._sent[to] = (self._sent[to] if to in self._sent else 0) + 1  # noqa: SIM401  # likewise
        message = (number & 0x3F_FFFF) << 41 | tag << 21 | (peer + 1 & 0xF_FFFF) << 1 | is_sent
        if slot in self._open:
            self._open[slot].messages += [message]
            message = NO_MESSAGE  # the script cannot wait for it alone
        if place is not None:
            place.message, place.is_counted = message, True
        return message

    def take_back(self, slot: int, message: int) -> None:
        """A message that has begun is not issued: its peer does not count it either.

        `message`: the result of `begun`; NO_MESSAGE: the last one of the bundle that is open.
        """
        if message == NO_MESSAGE:
            bundle = self._open.get(slot)
            if bundle is None or not bundle.messages:
                return
            message = bundle.messages.pop()
        _, peer, tag = message_of(message)
        is_sent = bool(message & 1)
        key = slot, peer, tag, is_sent
        if key in self._begun:  # else another group has the slot now
            self._begun[key] -= 1
        if is_sent and (slot, peer) in self._sent:
            self._sent[slot, peer] -= 1

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
        # a send that has ended says nothing of its receiver: only a receive orders two ranks
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
            # a script may never wait for a bundle: the oldest goes
            del self._bundles[next(iter(self._bundles))]
        return self._last_bundle
