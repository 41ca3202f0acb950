"""Asks all ranks where they stand when one has stalled, and says what follows. Pure; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.events import RankLook, RankStall, WorkerExit
from ..core.settings import OnHang
from .decide.hang_finding import HangAction, ending_of, find_hang
from .decide.hang_model import HangFinding

ANSWER_S = 8.0
"""So long is waited for the ranks that have not told yet."""
AGAIN_S = 60.0
"""A stall that is told within this time of a hang belongs to it."""
_STILL_SHARE = 0.5
"""It is a hang only if every rank has rested for this share of the limit that one of them has passed."""
_OWN_SHARE = 0.9
"""And for this share of its own limit, which is longer before its first batch, and where it compiles or saves."""


@dataclass
class AskedAll:
    """One time of asking after the other. Each has a number, from 1 on."""

    number: int = 0
    _asked_at: float = 0.0
    _again_at: float = 0.0
    _open: bool = False
    _attempt: int = 0
    _limit_s: float = 0.0
    _looks: dict[int, RankLook] = field(default_factory=dict)
    _ended: dict[tuple[int, int], WorkerExit] = field(default_factory=dict)

    def hear(self, event: RankStall | RankLook | WorkerExit, now: float) -> int | None:
        """Take an event. Returns the number under which all ranks are to be asked now; None for most."""
        if isinstance(event, WorkerExit):
            self._ended[event.where.attempt, event.where.rank] = event
        elif isinstance(event, RankLook):
            self.number = max(self.number, event.number)  # of a collector before this one
            if self._open and (event.number, event.where.attempt) == (self.number, self._attempt):
                self._looks[event.where.rank] = event
        elif not self._open and now >= self._again_at:
            self.number += 1
            self._asked_at, self._open, self._looks = now, True, {}
            self._attempt, self._limit_s = event.where.attempt, event.limit_s
            return self.number
        return None

    def forget(self) -> None:
        """What was asked before was concluded, or is asked again when a rank stalls again."""
        self._open, self._looks = False, {}

    def conclude(self, world_size: int, now: float, on_hang: OnHang) -> tuple[HangFinding, HangAction] | None:
        """What all of them together show, and what follows, once.

        None while some may still tell, and where it is no hang.
        """
        if not self._open:
            return None
        ended = {rank: exit_ for (attempt, rank), exit_ in self._ended.items() if attempt == self._attempt}
        if len(self._looks.keys() | ended.keys()) < world_size and now - self._asked_at < ANSWER_S:
            return None
        self._open = False
        looks = list(self._looks.values())
        if any(look.still_s < max(_STILL_SHARE * self._limit_s, _OWN_SHARE * look.limit_s) for look in looks):
            return None
        found = find_hang(looks, ended, world_size)
        if found is None:
            return None
        self._again_at = now + AGAIN_S
        return found, ending_of(found, looks, on_hang, self._limit_s)


def text_of(found: HangFinding, ending: HangAction) -> str:
    """For the terminal, while the job stands still."""
    return f"{found.statement} {'; '.join(found.evidence)} ({ending.text})"
