"""Pages that have come and were not looked at: events and beats that came after them are looked at first.

    socket --> events, names, beats --> fold, verdict
           --> pages, some a turn   --> fold, verdict

A message is taken from its socket, stored and acknowledged in its order. Only the look at a page waits: facts may be
put together in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..core.wire.messages import PageMessage

_AT_ONCE_BYTES = 2 << 20
"""So many bytes are looked at in one turn."""
_ROOM_BYTES = 16 << 20
"""With so many that wait, no more pages should be asked for."""


class WaitingPages:
    """By whom they were sent, and under what number."""

    def __init__(self) -> None:
        self._pages: deque[tuple[str, int, PageMessage, int]] = deque()
        self._num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._pages)

    @property
    def has_room(self) -> bool:
        """Whether more pages should come."""
        return self._num_bytes < _ROOM_BYTES

    def put(self, agent: str, n: int, page: PageMessage, num_bytes: int) -> None:
        """A page of so many bytes has come."""
        self._pages.append((agent, n, page, num_bytes))
        self._num_bytes += num_bytes

    def take(self, look: Callable[[str, int, PageMessage], None]) -> None:
        """Look at some of them, the oldest first."""
        left = _AT_ONCE_BYTES
        while self._pages and left > 0:
            agent, n, page, num_bytes = self._pages.popleft()
            self._num_bytes -= num_bytes
            left -= num_bytes
            look(agent, n, page)
