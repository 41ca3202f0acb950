"""Order at the collector: an event is looked at before all pages that came before it, and no page is left."""

from __future__ import annotations

from gpuwatch.collector.waiting_pages import WaitingPages
from gpuwatch.core.wire.messages import PageMessage, Segment


def page(number: int) -> PageMessage:
    return PageMessage(0, 0, number, 0, number, 0, True, [Segment(0, 0, 0, b"", b"", b"")])


def test_they_are_looked_at_in_their_order_some_at_a_time_and_make_room_again():
    waiting, seen = WaitingPages(), []
    for number in range(200):
        waiting.put("a", number, page(number), 130_000)
    assert not waiting.has_room
    turns = 0
    while waiting:
        before = len(seen)
        waiting.take(lambda agent, n, body: seen.append(n))
        assert 0 < len(seen) - before < 20, "the rest gets its turn"
        turns += 1
    assert seen == list(range(200))
    assert turns > 10
    assert waiting.has_room
    waiting.take(lambda agent, n, body: seen.append(n))
    assert len(seen) == 200
