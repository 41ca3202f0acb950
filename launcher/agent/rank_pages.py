"""Which pages of a rank are sent, and when: those of an anomaly, those that the collector asks for, the traced ones.

A node sends all batches of `--trace-batches` until it has used half of its share of the job's store. Then it sends one
batch of 2, beyond three quarters one of 4, and so on, until the share is used up. It chooses whole batches by their
numbers, so all ranks send the same ones. A batch that is not sent stays in the recorder for a while. If the collector
asks for a page then, or it is the last of its rank, it is sent all the same. No file, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.events.alarms import Anomaly
from ...core.events.definitions import split_label
from ...core.recorder.layout import FRAME, VALUE, HeadField
from ...core.recorder.reader import HeldPage, RecorderReader
from ...core.values import PENDING
from ...core.wire.messages import PageMessage

PAGE_WAIT_S = 5.0
"""How long an unfinished page may still grow before it is sent as it is."""
PAGE_SENDS = 5
"""How often a page may be sent while its rank runs: it is complete when the next batch begins, and in a pipeline its
backward comes after that. At the end it is sent once more if it has grown."""
EARLIER_PAGES = 3
"""Traced pages from before an anomaly that tell how it came: they are sent, whatever is thinned."""
LAST_PAGES = 8
"""How many of the pages that are unfinished when a rank ends are sent: one for each root that was at work."""

STORE_BYTES = 1 << 30
"""The most bytes of traced batches, all nodes together."""
_MOST_BATCHES = 4096
"""Batches of which is remembered whether they are sent; the oldest are forgotten."""
_MOST_APART = 1 << 20


class TracedBatches:
    """Which traced batches one of `nodes` nodes sends.

    >>> traced = TracedBatches(nodes=1, store_bytes=1000)
    >>> traced.spent(600)
    >>> [batch for batch in range(6) if traced.takes(batch)]
    [0, 2, 4]
    """

    def __init__(self, nodes: int = 1, store_bytes: int = STORE_BYTES) -> None:
        self._share = self._left = store_bytes / max(1, nodes)
        self._decided: dict[int, bool] = {}

    def takes(self, batch: int) -> bool:
        """Whether this batch is sent: the same answer for all ranks of the node."""
        decided = self._decided.get(batch)
        if decided is None:
            decided = self._decided[batch] = self._left > 0 and batch % self._every == 0
            if len(self._decided) > _MOST_BATCHES:
                del self._decided[next(iter(self._decided))]
        return decided

    def sent(self, page: PageMessage) -> None:
        """A page of a traced batch is sent."""
        self.spent(sum(len(part.frames) + len(part.rows) + len(part.values) for part in page.segments))

    def spent(self, num_bytes: int) -> None:
        """Count these bytes against the share."""
        self._left -= num_bytes

    @property
    def _every(self) -> int:
        every = 1
        while every < _MOST_APART and self._left * 2 * every <= self._share:
            every *= 2
        return every


@dataclass
class _BatchRequest:
    """A batch that somebody asked for."""

    deadline: float
    met: bool = False
    """Whether a page of it has been seen."""


@dataclass(frozen=True)
class _PageCopy:
    """What of a page has been sent."""

    times: int
    extent: tuple[int, int, bool]
    """Frames and values since its beginning, and whether it was complete."""
    pending: int
    """Values that had not come back from their device."""


class PageSelection:
    """Selects the pages of one rank. The user asked for the batches `traced`; `traces` says which of them to send."""

    def __init__(self, traced: list[int], traces: TracedBatches) -> None:
        self.ended = False
        """The rank has ended: its recorder will not change."""
        self._wanted: dict[tuple[str, int, int], _BatchRequest] = {}
        """by root class, ordinal, batch"""
        self._traced = frozenset(traced)
        self._traces = traces
        self._thinned: set[int] = set()
        """By number: traced pages that the ring holds and that were not sent."""
        self._thinned_before = 0
        """Those that the ring holds no more."""
        self._looked_at = -1
        """The last segment searched for a traced batch."""
        self._traced_until = -1
        """The segment that overwrites the last one that had some."""
        self._sent: dict[int, _PageCopy] = {}
        """by number of the page, as long as the ring holds something of it"""

    @property
    def thinned(self) -> int:
        """How many traced pages were not sent."""
        return self._thinned_before + len(self._thinned)

    def want(self, batch: tuple[str, int, int], now: float) -> None:
        """Somebody asks for a batch: class and ordinal of its root, and its number."""
        self._wanted.setdefault(batch, _BatchRequest(now + PAGE_WAIT_S))

    def want_at_once(self, batch: tuple[str, int, int], now: float) -> None:
        """Send a batch as it is: its rank does not move."""
        self._wanted[batch] = _BatchRequest(now)

    def want_of(self, anomaly: Anomaly, now: float) -> None:
        """The batch of an anomaly, and the traced ones before it that tell how it came."""
        root, batch = split_label(anomaly.where.root), anomaly.where.batch
        earlier = self._traced.intersection(range(max(0, batch - EARLIER_PAGES), batch))
        for number in (batch, *sorted(earlier)):
            self.want((*root, number), now)

    def due(self, reader: RecorderReader, now: float) -> list[PageMessage]:
        """The pages that are due now."""
        if not self._wanted and (self.ended or not self._traced_in_ring(reader)):
            return []
        messages: list[PageMessage] = []
        held = reader.held()
        seen: set[tuple[str, int, int]] = set()
        for page in held:
            root = reader.roots.get(page.root)
            key = (root.cls, root.ordinal, page.batch) if root is not None else ("", -1, page.batch)
            wanted = self._wanted.get(key)
            if wanted is not None:
                wanted.met = True
                seen.add(key)
            is_traced = page.batch in self._traced
            if wanted is not None or (is_traced and self._traces.takes(page.batch)):
                messages += self._page(reader, page, overdue=wanted is not None and now >= wanted.deadline)
            elif is_traced and page.number not in self._sent:
                self._thinned.add(page.number)
        for key, wanted in list(self._wanted.items()):
            if self.ended or (key not in seen and (wanted.met or now >= wanted.deadline)):
                del self._wanted[key]  # it will not change, or was overwritten, or never came
        numbers = {page.number for page in held}
        self._sent = {number: copy for number, copy in self._sent.items() if number in numbers}
        gone = self._thinned - numbers
        self._thinned -= gone
        self._thinned_before += len(gone)
        return messages

    def _traced_in_ring(self, reader: RecorderReader) -> bool:
        """Whether the ring holds a batch that is traced."""
        if not self._traced:
            return False
        for number, batch in reader.begun_after(self._looked_at):
            self._looked_at = number
            if batch in self._traced:
                self._traced_until = number + reader.segments
        return self._looked_at < self._traced_until

    def last(self, reader: RecorderReader) -> list[PageMessage]:
        """The page that was written last, and those that more was expected in."""
        held = reader.held()
        traced = [page for page in held if page.batch in self._traced]
        numbers = {page.number for page in traced if self._traces.takes(page.batch)}
        self._thinned.update({page.number for page in traced} - numbers - self._sent.keys())
        numbers.update([page.number for page in held if not page.complete][-LAST_PAGES:])
        numbers.add(reader[HeadField.PAGE])
        return [
            message for page in held if page.number in numbers for message in self._page(reader, page, overdue=True)
        ]

    def _page(self, reader: RecorderReader, held: HeldPage, *, overdue: bool) -> list[PageMessage]:
        """The page if it is time to send it: when it is complete, or overdue; again when it is complete and has grown.

        A page that has not changed since it was sent is not sent again.
        """
        sent = self._sent.get(held.number)
        if sent is not None and not sent.pending and sent.extent == (held.frames, held.values, held.complete):
            return []
        if not self.ended:
            if sent is not None and sent.times >= PAGE_SENDS:
                return []
            if not held.complete and (sent is not None or not overdue):
                return []
        page = reader.page(held.number)
        if page is None:
            return []
        last, pending = page.segments[-1], pending_values(page)
        frames = last.frame_base + len(last.frames) // FRAME.size
        extent = frames, last.value_base + len(last.values) // VALUE.size, page.complete
        if sent is not None and (extent, pending) == (sent.extent, sent.pending):
            return []
        if pending and not self.ended and (sent is not None or not overdue):
            return []
        self._thinned.discard(held.number)
        if held.batch in self._traced:
            self._traces.sent(page)
        self._sent[held.number] = _PageCopy(sent.times + 1 if sent is not None else 1, extent, pending)
        return [page]


def pending_values(page: PageMessage) -> int:
    """How many values of a page have not come back from their device."""
    return sum(memoryview(segment.values).cast("q")[2::3].tolist().count(PENDING) for segment in page.segments)
