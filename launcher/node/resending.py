"""When a node agent sends again what was not acknowledged. No socket, no clock.

One connection keeps the order. So if a beat is answered, all that was sent before it has come, or is lost: the answer
says which. A collector that is slow is sent nothing twice; only its silence, or a loss, is a reason. A silent one is
sent it once more: what is sent waits in the socket, and would pile up there. From then on beats ask.
"""

from __future__ import annotations

RESEND_S = 3.0
LONGEST_RESEND_S = 60.0
"""Twice as long each time, while nothing is acknowledged."""
_KEPT_BEATS = 256


class Resending:
    """`now` is monotonic time in seconds."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._pause_s = RESEND_S
        self._not_before = now
        self._sent_before: dict[int, int] = {}
        """By the time in a beat: the highest number that had been sent before it."""
        self._sent_in_silence = False

    def moved(self, now: float) -> None:
        """Something was sent."""
        self._last = now

    def heard(self, now: float) -> None:
        """The collector has said something."""
        self._last = now
        self._sent_in_silence = False

    def acknowledged(self, now: float) -> None:
        """Something new was acknowledged."""
        self._sent_in_silence = False
        self._pause_s = RESEND_S
        self._not_before = now

    def beat(self, sent_ns: int, number: int) -> None:
        """A beat leaves, after everything up to `number`."""
        self._sent_before[sent_ns] = number
        if len(self._sent_before) > _KEPT_BEATS:
            del self._sent_before[next(iter(self._sent_before))]

    def is_lost(self, echo_ns: int, received: int, now: float) -> bool:
        """Whether a beat is answered and something before it has not come; `received` is -1 if that is not said."""
        number = self._sent_before.pop(echo_ns, 0)
        return 0 <= received < number and now >= self._not_before and self._again(now)

    def is_due(self, now: float) -> bool:
        """Whether nothing has moved for too long, for the first time since the collector was heard."""
        if self._sent_in_silence or now - self._last <= self._pause_s:
            return False
        self._sent_in_silence = True
        return self._again(now)

    def _again(self, now: float) -> bool:
        self._last = now
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_RESEND_S)
        self._sent_before.clear()  # those beats came before what is sent now
        return True
