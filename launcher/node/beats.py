"""When a node agent beats: twice a second, and less often while a collector that has too much to do owes the answer.

Beats need no credit. Those of a thousand agents would wait in the collector's memory without end, and events behind
them. No socket, no clock.
"""

from __future__ import annotations

BEAT_S = 0.5
UNANSWERED_S = 2.0
"""So long an answer is waited for. Then it beats all the same: the beat or its answer may be lost."""


class Beats:
    """`now` is monotonic time in seconds."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._waits_for = 0
        """The time in the beat that has not been answered; 0: none."""

    def is_due(self, now: float) -> bool:
        """Whether to send one."""
        return self._last is None or now - self._last >= (UNANSWERED_S if self._waits_for else BEAT_S)

    def sent(self, sent_ns: int, now: float) -> None:
        """One has left, or there was no room for it."""
        self._last = now
        self._waits_for = sent_ns

    def answered(self, echo_ns: int) -> None:
        """The collector has heard the beat with this time."""
        if echo_ns == self._waits_for:
            self._waits_for = 0
