"""What a node agent has to send: kept until the collector has it. Names and pages wait for credit, nothing else does.

    events                          ----------> numbered, sent, kept until they are acknowledged
    names, needed pages, other pages  --> wait here --> numbered when the collector has room for their bytes

So a collector is never sent more bytes than it has room for, and an event overtakes what waits. Credit is free again
when the collector has taken a message from its socket; the message is kept until it is stored. Pages take bounded
memory: one that nothing needs is dropped first, then the oldest, and last the pages of the batches that were needed
first: the verdict is about these. A dropped page is counted, and the spool has it. Histories and telemetry may be
dropped likewise. Nothing else is ever dropped.

A page is needed if it is of a batch in which a rank has met something, or among the last of its rank.

No socket here: `due()` says what to send now, `acknowledged()` forgets it, `send_again()` starts over.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ...core.wire import messages

PAGE_BYTES = 12 << 20
"""Pages that wait for credit, and those that were sent and are not stored, may take this much memory together."""
OTHER_BYTES = 8 << 20
"""How much of it the waiting pages that nothing needs may take."""
_MOST_NEEDED = 512
"""Batches that are remembered as needed; the oldest are forgotten."""
_FIRST_NEEDED = 4
"""How many needed batches of each attempt are dropped last of all: an overflow's, and those before it."""


class _WaitingPage(NamedTuple):
    data: bytes
    rank: int
    """-1 where it is about the node"""
    of: tuple[int, int]
    """attempt and batch"""


class MessageOutbox:
    """Numbered messages in order, and the pages that wait for a number."""

    def __init__(self, page_bytes: int = PAGE_BYTES, other_bytes: int = OTHER_BYTES) -> None:
        self._page_limit = page_bytes
        self._other_limit = min(page_bytes, other_bytes)
        self._names: deque[bytes] = deque()
        self._needed: deque[_WaitingPage] = deque()
        self._others: deque[_WaitingPage] = deque()
        """Pages that nothing needs."""
        self._needed_batches: dict[tuple[int, int], None] = {}
        self._first_needed: set[tuple[int, int]] = set()
        self._page_bytes = self._other_bytes = 0
        """Bytes of all waiting pages, and of those that nothing needs."""
        self._bye: bytes | None = None
        self._credit = messages.FIRST_CREDIT
        self._on_the_way = 0
        self._kept_bytes = 0
        """Bytes of messages that have taken credit and are not acknowledged."""
        self._kept: dict[int, tuple[bytes, bool]] = {}
        """By number, without a gap: body, and whether it has taken credit."""
        self._next = 1
        self._spooled = 0
        self.last_sent = 0
        """The highest number sent so far."""
        self._received = 0
        self._acknowledged = 0
        self.pages_dropped: dict[int, int] = {}
        """rank -> pages and histories that were dropped"""

    def put(self, body: messages.AgentBody, *, needed: bool = False) -> bytes:
        """Keep a message. Returns it for the spool, which counts for itself. `needed` is said of a page."""
        data = messages.encode(body)
        if isinstance(body, messages.PageMessage):
            of = body.attempt, body.batch
            self._wait(_WaitingPage(data, body.rank, of), needed or of in self._needed_batches)
        elif isinstance(body, messages.RankHistoryMessage | messages.TelemetryMessage):
            page = _WaitingPage(data, getattr(body, "rank", -1), (-1, -1))
            if self._page_bytes + len(data) <= self._page_limit // 2:  # it displaces no page
                self._wait(page, needed=True)
            else:
                self._count_dropped(page)
        elif isinstance(body, messages.NameDefinitions):
            self._names.append(data)
        elif isinstance(body, messages.NodeBye):  # after everything else
            self._bye = data
        else:
            self._number(data)
        self._spooled += 1
        return messages.envelope(self._spooled, self._spooled - 1, data)

    def need(self, attempt: int, batch: int) -> None:
        """A rank has met something in this batch: the pages of it go first, and are dropped last."""
        if (attempt, batch) not in self._needed_batches:
            if sum(of == attempt for of, _ in self._first_needed) < _FIRST_NEEDED:
                self._first_needed.add((attempt, batch))
            self._needed_batches[attempt, batch] = None
        if len(self._needed_batches) > _MOST_NEEDED:
            del self._needed_batches[next(iter(self._needed_batches))]
        found = [page for page in self._others if page.of == (attempt, batch)]
        if found:
            self._others = deque(page for page in self._others if page.of != (attempt, batch))
            self._other_bytes -= sum(len(page.data) for page in found)
            self._needed.extend(found)

    def change_first(self, body: messages.AgentBody) -> None:
        """If the first message has to be sent again, send this in its place: a hello that knows its run by then."""
        if 1 in self._kept:
            self._kept[1] = messages.encode(body), False

    def _number(self, data: bytes, *, on_credit: bool = False) -> None:
        self._kept[self._next] = data, on_credit
        self._next += 1
        if on_credit:
            self._on_the_way += len(data)
            self._kept_bytes += len(data)

    def _wait(self, page: _WaitingPage, needed: bool) -> None:
        (self._needed if needed else self._others).append(page)
        self._page_bytes += len(page.data)
        self._other_bytes += 0 if needed else len(page.data)
        while len(self._others) > 1 and self._other_bytes > self._other_limit:
            self._count_dropped(self._take(self._others))
        while self._page_bytes + self._kept_bytes > self._page_limit and len(self._needed) + len(self._others) > 1:
            if self._others and (self._needed or len(self._others) > 1):
                self._count_dropped(self._take(self._others))
            else:
                later = (n for n, each in enumerate(self._needed) if each.of not in self._first_needed)
                self._count_dropped(self._take(self._needed, next(later, -1)))

    def _count_dropped(self, page: _WaitingPage) -> None:
        if page.rank != -1:
            self.pages_dropped[page.rank] = self.pages_dropped.get(page.rank, 0) + 1

    def _take(self, pages: deque[_WaitingPage], number: int = 0) -> _WaitingPage:
        page = pages[number]
        del pages[number]
        self._page_bytes -= len(page.data)
        self._other_bytes -= len(page.data) if pages is self._others else 0
        return page

    def _release(self) -> None:
        """Number as many messages as there is credit for: names first, since pages refer to them, then needed pages."""
        while self._names and self._may_go(self._names[0]):
            self._number(self._names.popleft(), on_credit=True)
        while not self._names and (pages := self._needed or self._others) and self._may_go(pages[0].data):
            if self._kept_bytes > self._page_limit and self._bye is None:  # no disk takes them
                break
            self._number(self._take(pages).data, on_credit=True)
        if self._bye is not None and not (self._names or self._needed or self._others):
            self._number(self._bye)
            self._bye = None

    def _may_go(self, data: bytes) -> bool:
        """One at a time may, however big it is, if there is any credit at all."""
        return (self._credit > 0 and not self._on_the_way) or self._on_the_way + len(data) <= self._credit

    def due(self) -> list[tuple[int, bytes]]:
        """(number, bytes) of the messages to send now, in order."""
        self._release()
        return [(number, self._enveloped(number)) for number in range(self.last_sent + 1, self._next)]

    def _enveloped(self, number: int) -> bytes:
        return messages.envelope(number, number - 1, self._kept[number][0])

    def sent(self, number: int) -> None:
        """Everything up to `number` is on its way."""
        self.last_sent = max(self.last_sent, number)

    def acknowledged(self, number: int, credit: int = -1, received: int = -1) -> bool:
        """The collector has stored everything up to `number`, and has room for `credit` bytes; -1: it does not say.

        `received` is the number up to which it has everything, stored or not. Returns whether `number` is news.
        """
        if credit >= 0:
            self._credit = credit
        number = min(number, self._next - 1)
        news = number > self._acknowledged
        received = min(max(number, received), self._next - 1)
        for come in range(self._received + 1, received + 1):
            data, on_credit = self._kept[come]
            self._on_the_way -= len(data) if on_credit else 0
        self._received = max(self._received, received)
        for old in range(self._acknowledged + 1, number + 1):
            data, on_credit = self._kept.pop(old)
            self._kept_bytes -= len(data) if on_credit else 0
        self._acknowledged = max(self._acknowledged, number)
        self.last_sent = max(self.last_sent, self._acknowledged)
        return news

    def is_forgotten(self, number: int) -> bool:
        """Whether a collector that has everything up to `number` has lost what it had acknowledged before."""
        return number < self._acknowledged

    def send_again(self) -> None:
        """Whatever is not acknowledged may have been lost on the way."""
        self.last_sent = self._acknowledged

    @property
    def empty(self) -> bool:
        """The collector has everything."""
        return not (self._kept or self._names or self._needed or self._others or self._bye)

    def unacknowledged(self) -> list[bytes]:
        """For the spool, when the collector never came back."""
        numbered = [self._enveloped(number) for number in self._kept]
        pages = [page.data for page in (*self._needed, *self._others)]
        waiting = [*self._names, *pages, *([self._bye] if self._bye is not None else [])]
        return [
            *numbered,
            *(messages.envelope(number, number - 1, data) for number, data in enumerate(waiting, self._next)),
        ]
