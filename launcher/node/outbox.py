"""What a node agent has to send: kept until the collector has it, pages dropped under pressure, oldest first.

No socket here: `due()` says what to send now, `acknowledged()` forgets it, `send_again()` starts over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ...core.wire.messages import AgentBody, PageMessage, encode_body, envelope

PAGE_BYTES = 64 << 20
"""Pages that wait for an acknowledgement may take this much memory."""


class Outbox:
    """Numbered messages in order."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self._page_limit = page_bytes
        self._page_bytes = 0
        self._kept: OrderedDict[int, tuple[bytes, int | None]] = OrderedDict()
        self._next = 1
        self._sent = 0
        self._acknowledged = 0
        self.pages_dropped: dict[int, int] = {}
        """rank -> pages that were dropped"""

    def put(self, body: AgentBody) -> bytes:
        """Number a message and keep it. Returns it as it goes over the wire if nothing before it was dropped."""
        data = encode_body(body)
        rank = body.rank if isinstance(body, PageMessage) else None
        self._kept[self._next] = (data, rank)
        self._next += 1
        if rank is not None:
            self._page_bytes += len(data)
            self._drop_pages()
        return envelope(self._next - 1, self._next - 2, data)

    def _drop_pages(self) -> None:
        if self._page_bytes <= self._page_limit:
            return
        pages = [number for number, (_, rank) in self._kept.items() if rank is not None]
        for number in pages[:-1]:  # the newest is what the question is about
            data, rank = self._kept.pop(number)
            assert rank is not None
            self._page_bytes -= len(data)
            self.pages_dropped[rank] = self.pages_dropped.get(rank, 0) + 1
            if self._page_bytes <= self._page_limit:
                return

    def due(self) -> list[tuple[int, bytes]]:
        """(number, bytes) of what has not been sent yet, in order."""
        return (
            [(number, data) for number, data in self._enveloped() if number > self._sent]
            if self._next - 1 > self._sent
            else []
        )

    def _enveloped(self) -> Iterator[tuple[int, bytes]]:
        after = self._acknowledged
        for number, (data, _) in self._kept.items():
            yield number, envelope(number, after, data)
            after = number

    def sent(self, number: int) -> None:
        """Everything up to `number` is on its way."""
        self._sent = max(self._sent, number)

    def acknowledged(self, number: int) -> bool:
        """The collector has everything up to `number`. Returns whether that is news."""
        news = number > self._acknowledged
        self._acknowledged = max(self._acknowledged, number)
        while self._kept and next(iter(self._kept)) <= number:
            _, (data, rank) = self._kept.popitem(last=False)
            if rank is not None:
                self._page_bytes -= len(data)
        return news

    def is_forgotten(self, number: int) -> bool:
        """Whether a collector that has everything up to `number` has lost what it had acknowledged before."""
        return number < self._acknowledged

    def send_again(self) -> None:
        """Whatever is not acknowledged may have been lost on the way."""
        self._sent = self._acknowledged

    @property
    def empty(self) -> bool:
        """The collector has everything."""
        return not self._kept

    def unacknowledged(self) -> list[bytes]:
        """For the spool, when the collector never came back."""
        return [data for _, data in self._enveloped()]
