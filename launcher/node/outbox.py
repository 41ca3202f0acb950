"""What a node agent has to send: kept until the collector has it. Pages wait for credit, everything else does not.

    events, names  ---------------------------> numbered, sent, kept until they are acknowledged
    pages          --> wait here, bounded ----> numbered when the collector has room for their bytes

So a collector is never sent more pages than it has room for, and an event overtakes pages that wait. A page that waits
too long is dropped, oldest first, and counted; the spool has it. What has a number is never dropped.

No socket here: `due()` says what to send now, `acknowledged()` forgets it, `send_again()` starts over.
"""

from __future__ import annotations

from collections import deque

from ...core.wire.messages import FIRST_CREDIT, AgentBody, Bye, PageMessage, encode_body, envelope

PAGE_BYTES = 64 << 20
"""Pages that wait for credit may take this much memory."""


class Outbox:
    """Numbered messages in order, and the pages that wait for a number."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self._page_limit = page_bytes
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        """(body, rank) of pages; and the goodbye, which comes after all of them"""
        self._waiting_bytes = 0
        self._credit = FIRST_CREDIT
        self._on_the_way = 0
        self._kept: dict[int, tuple[bytes, bool]] = {}
        """By number, without a gap: body, and whether it is a page."""
        self._next = 1
        self._spooled = 0
        self._sent = 0
        self._acknowledged = 0
        self.pages_dropped: dict[int, int] = {}
        """rank -> pages that were dropped"""

    def put(self, body: AgentBody) -> bytes:
        """Keep a message. Returns it for the spool, which counts for itself."""
        data = encode_body(body)
        if isinstance(body, PageMessage):
            self._waiting.append((data, body.rank))
            self._waiting_bytes += len(data)
            self._drop_pages()
        elif isinstance(body, Bye) and self._waiting:
            self._waiting.append((data, None))
        else:
            self._number(data, is_page=False)
        self._spooled += 1
        return envelope(self._spooled, self._spooled - 1, data)

    def _number(self, data: bytes, *, is_page: bool) -> None:
        self._kept[self._next] = data, is_page
        self._next += 1

    def _drop_pages(self) -> None:
        while self._waiting_bytes > self._page_limit and len(self._waiting) > 1:  # the newest is what is asked about
            data, rank = self._waiting.popleft()
            assert rank is not None
            self._waiting_bytes -= len(data)
            self.pages_dropped[rank] = self.pages_dropped.get(rank, 0) + 1

    def _release(self) -> None:
        """Number what there is credit for. One page is always let go, however big it is."""
        while self._waiting:
            data, rank = self._waiting[0]
            is_page = rank is not None
            if is_page and self._on_the_way and self._on_the_way + len(data) > self._credit:
                return
            self._waiting.popleft()
            if is_page:
                self._waiting_bytes -= len(data)
                self._on_the_way += len(data)
            self._number(data, is_page=is_page)

    def due(self) -> list[tuple[int, bytes]]:
        """(number, bytes) of what is to be sent now, in order."""
        self._release()
        return [(number, self._enveloped(number)) for number in range(self._sent + 1, self._next)]

    def _enveloped(self, number: int) -> bytes:
        return envelope(number, number - 1, self._kept[number][0])

    def sent(self, number: int) -> None:
        """Everything up to `number` is on its way."""
        self._sent = max(self._sent, number)

    def acknowledged(self, number: int, credit: int = -1) -> bool:
        """The collector has everything up to `number`, and room for so many bytes of pages; -1: it does not say.

        Returns whether the number is news.
        """
        if credit >= 0:
            self._credit = credit
        number = min(number, self._next - 1)
        news = number > self._acknowledged
        for old in range(self._acknowledged + 1, number + 1):
            data, is_page = self._kept.pop(old)
            if is_page:
                self._on_the_way -= len(data)
        self._acknowledged = max(self._acknowledged, number)
        self._sent = max(self._sent, self._acknowledged)
        return news

    def send_again(self) -> None:
        """Whatever is not acknowledged may have been lost on the way."""
        self._sent = self._acknowledged

    @property
    def empty(self) -> bool:
        """The collector has everything."""
        return not self._kept and not self._waiting

    def unacknowledged(self) -> list[bytes]:
        """For the spool, when the collector never came back."""
        numbered = [self._enveloped(number) for number in self._kept]
        waiting = [envelope(number, number - 1, data) for number, (data, _) in enumerate(self._waiting, self._next)]
        return [*numbered, *waiting]
