"""While somebody looks on and no rank moves: the ranks are asked where they are, and who waits for whom is shown. Pure.

Long before a rest counts as a stall, so nothing is decided by it. The finding is made as for a stall, by `find_hang`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...core.wire.beat import NodeBeat
from ...core.wire.view import JobView
from ..ends.hang_finding import find_hang
from ..ends.hang_model import HangFinding
from ..facts.run_facts import RunFacts
from .snapshot import STILL_S, StacksRound, behind_of

REST_S = 8.0
"""Seconds without progress of any rank, after which they are asked. A long call is not asked in its first seconds."""
AGAIN_S = 15.0
"""Seconds from one round to the next, as long as none moves."""


@dataclass
class RestingRanks:
    """Give it each picture and each beat, and ask whether a round is due."""

    found: tuple[int, HangFinding] | None = None
    """Who waits for whom, with the attempt; None once a rank has moved."""
    _round: StacksRound = field(default_factory=StacksRound)
    _running: frozenset[int] = frozenset()
    """All ranks of the last picture that have not ended, if none of them moves; else empty."""
    _is_explained: bool = False
    """The picture tells already whom they wait for."""
    _next_at: float = 0.0
    _seen_ns: int = 0
    """The time of the last picture."""

    def see(self, view: JobView) -> None:
        """A picture for viewers is made."""
        running = [rank for rank in view.ranks if not rank.ended]
        rests = len(running) > 1 and all(rank.still_s >= REST_S for rank in running)
        self._running = frozenset(rank.rank for rank in running) if rests else frozenset()
        was_away = view.time_ns - self._seen_ns > STILL_S * 1e9  # nobody looked on: they may have moved and rested anew
        self._seen_ns = view.time_ns
        if not rests or was_away:
            self.found, self._next_at = None, 0.0
        self._is_explained = self.found is None and bool(behind_of(view))

    def asks(self, now: float) -> bool:
        """Whether the ranks are asked for the first time in this rest, or are to be now: a later picture tells."""
        return self.found is None and (self._round.is_open or self._is_due(now))

    def begins(self, now: float) -> bool:
        """Whether all agents are to look at their ranks now."""
        if not self._is_due(now):
            return False
        self._next_at = now + AGAIN_S
        return self._round.begins(now)

    def _is_due(self, now: float) -> bool:
        return bool(self._running) and not self._is_explained and now >= self._next_at

    def on_message(self, beat: NodeBeat) -> None:
        """Take the looks of a beat."""
        self._round.on_message(beat)

    def conclude(self, facts: RunFacts, now: float) -> None:
        """Once all have been looked at, or have had their time: who waits for whom."""
        looks = self._round.conclude(self._running, now)
        if looks is None:
            return
        attempt = facts.last_attempt
        ended = {
            rank.rank: rank.exit for rank in facts.of_attempt(attempt) if rank.exit is not None and not rank.runs_on
        }
        moved = any(look.still_s < STILL_S or look.where.attempt != attempt for look in looks)
        found = find_hang(looks, ended, facts.announced_ranks) if self._running and looks and not moved else None
        self.found = (attempt, found) if found is not None and found.ranks else None
