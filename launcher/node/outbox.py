"""What a node agent has to send: kept until the collector has it. Names and pages wait for credit, nothing else does.

    events           -------------------------> numbered, sent, kept until they are acknowledged
    names, then pages  --> wait here ---------> numbered when the collector has room for their bytes

So a collector is never sent more bytes than it has room for, and an event overtakes what waits. Credit is free again
when the collector has taken a message from its socket; the message is kept until it is stored. Pages take bounded
memory: the oldest that waits is dropped and counted, and the spool has it. Nothing else is ever dropped.

No socket here: `due()` says what to send now, `acknowledged()` forgets it, `send_again()` starts over.
"""

from __future__ import annotations

from collections import deque

from ...core.wire.messages import (
    FIRST_CREDIT,
    AgentBody,
    Bye,
    Definitions,
    History,
    PageMessage,
    Telemetry,
    encode_body,
    envelope,
)

PAGE_BYTES = 64 << 20
"""Pages that wait for credit may take this much memory; and so may those that were sent and are not stored."""


class Outbox:
    """Numbered messages in order, and the pages that wait for a number."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self._page_limit = page_bytes
        self._names: deque[bytes] = deque()
        self._pages: deque[tuple[bytes, int]] = deque()
        """(body, rank); the rank is -1 where it is about the node"""
        self._page_bytes = 0
        self._bye: bytes | None = None
        self._credit = FIRST_CREDIT
        self._on_the_way = 0
        self._kept_bytes = 0
        """Of what has taken credit and is not acknowledged."""
        self._kept: dict[int, tuple[bytes, bool]] = {}
        """By number, without a gap: body, and whether it has taken credit."""
        self._next = 1
        self._spooled = 0
        self._sent = 0
        self._received = 0
        self._acknowledged = 0
        self.pages_dropped: dict[int, int] = {}
        """rank -> pages that were dropped"""

    def put(self, body: AgentBody) -> bytes:
        """Keep a message. Returns it for the spool, which counts for itself."""
        data = encode_body(body)
        if isinstance(body, PageMessage):
            self._pages.append((data, body.rank))
            self._page_bytes += len(data)
            self._drop_pages()
        elif isinstance(body, History | Telemetry):
            if self._page_bytes + len(data) <= self._page_limit // 2:  # it displaces no page
                self._pages.append((data, body.rank if isinstance(body, History) else -1))
                self._page_bytes += len(data)
        elif isinstance(body, Definitions):
            self._names.append(data)
        elif isinstance(body, Bye):  # after everything else
            self._bye = data
        else:
            self._number(data)
        self._spooled += 1
        return envelope(self._spooled, self._spooled - 1, data)

    def change_first(self, body: AgentBody) -> None:
        """If the first message has to be sent again, send this in its place: a hello that knows its run by then."""
        if 1 in self._kept:
            self._kept[1] = encode_body(body), False

    def _number(self, data: bytes, *, on_credit: bool = False) -> None:
        self._kept[self._next] = data, on_credit
        self._next += 1
        if on_credit:
            self._on_the_way += len(data)
            self._kept_bytes += len(data)

    def _drop_pages(self) -> None:
        while self._page_bytes > self._page_limit and len(self._pages) > 1:  # the newest is what is asked about
            data, rank = self._pages.popleft()
            self._page_bytes -= len(data)
            if rank != -1:
                self.pages_dropped[rank] = self.pages_dropped.get(rank, 0) + 1

    def _release(self) -> None:
        """Number what there is credit for: names first, as the pages are about them."""
        while self._names and self._may_go(self._names[0]):
            self._number(self._names.popleft(), on_credit=True)
        while self._pages and not self._names and self._may_go(self._pages[0][0]):
            if self._kept_bytes > self._page_limit and self._bye is None:  # no disk takes them
                break
            data, _ = self._pages.popleft()
            self._page_bytes -= len(data)
            self._number(data, on_credit=True)
        if self._bye is not None and not self._names and not self._pages:
            self._number(self._bye)
            self._bye = None

    def _may_go(self, data: bytes) -> bool:
        """One at a time may, however big it is, if there is any credit at all."""
        return (self._credit > 0 and not self._on_the_way) or self._on_the_way + len(data) <= self._credit

    def due(self) -> list[tuple[int, bytes]]:
        """(number, bytes) of what is to be sent now, in order."""
        self._release()
        return [(number, self._enveloped(number)) for number in range(self._sent + 1, self._next)]

    def _enveloped(self, number: int) -> bytes:
        return envelope(number, number - 1, self._kept[number][0])

    def sent(self, number: int) -> None:
        """Everything up to `number` is on its way."""
        self._sent = max(self._sent, number)

    def acknowledged(self, number: int, credit: int = -1, received: int = -1) -> bool:
        """The collector has stored everything up to `number`, and has room for so many bytes; -1: it does not say.

        `received` is the number up to which it has everything, stored or not. Returns whether `number` is news.
        """
        if credit >= 0:
            self._credit = credit
        number = min(number, self._next - 1)
        news = number > self._acknowledged
        self._free_credit(min(max(number, received), self._next - 1))
        for old in range(self._acknowledged + 1, number + 1):
            data, on_credit = self._kept.pop(old)
            self._kept_bytes -= len(data) if on_credit else 0
        self._acknowledged = max(self._acknowledged, number)
        self._sent = max(self._sent, self._acknowledged)
        return news

    def is_forgotten(self, number: int) -> bool:
        """Whether a collector that has everything up to `number` has lost what it had acknowledged before."""
        return number < self._acknowledged

    def _free_credit(self, received: int) -> None:
        for number in range(self._received + 1, received + 1):
            data, on_credit = self._kept[number]
            self._on_the_way -= len(data) if on_credit else 0
        self._received = max(self._received, received)

    @property
    def last_sent(self) -> int:
        """The highest number that is on its way, or has come."""
        return self._sent

    def send_again(self) -> None:
        """Whatever is not acknowledged may have been lost on the way."""
        self._sent = self._acknowledged

    @property
    def empty(self) -> bool:
        """The collector has everything."""
        return not (self._kept or self._names or self._pages or self._bye)

    def unacknowledged(self) -> list[bytes]:
        """For the spool, when the collector never came back."""
        numbered = [self._enveloped(number) for number in self._kept]
        waiting = [*self._names, *(data for data, _ in self._pages), *([self._bye] if self._bye is not None else [])]
        return [*numbered, *(envelope(number, number - 1, data) for number, data in enumerate(waiting, self._next))]
