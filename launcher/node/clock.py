"""By how much the collector's clock is ahead of this host's, as NTP measures it: the quickest of many exchanges counts.

offset = the collector's time - the middle between sending and hearing;  uncertain by half of the round trip
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT = 64
"""Exchanges that are compared: half a minute of beats, so that a clock which was set is believed soon."""


@dataclass(frozen=True)
class Exchange:
    """One question and its answer; nanoseconds."""

    round_trip_ns: int
    offset_ns: int


class ClockOffset:
    """What the exchanges have told so far."""

    def __init__(self) -> None:
        self._exchanges: deque[Exchange] = deque(maxlen=KEPT)

    def hear(self, sent_ns: int, theirs_ns: int, now_ns: int) -> None:
        """An answer has come at `now_ns` to what was sent at `sent_ns`, both by this host's clock."""
        if not sent_ns or not theirs_ns or now_ns < sent_ns:  # an older collector; a clock that was set back meanwhile
            return
        self._exchanges.append(Exchange(now_ns - sent_ns, theirs_ns - (sent_ns + now_ns) // 2))

    @property
    def best(self) -> Exchange | None:
        """The quickest exchange; None before the first."""
        return min(self._exchanges, key=lambda exchange: exchange.round_trip_ns, default=None)
