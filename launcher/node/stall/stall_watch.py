"""The node agent's watch over ranks that do not move: tells of one that stalls, and looks at all when it is asked."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from ....core.records import RankLook, Stalled
from ....core.stalls import takes_long
from ..ranks import RankWatch
from .hang_limit import HangLimit, fixed_limit, learned_limit
from .looks import Look
from .rest import Rest

MOST_SPYING = 16
"""Ranks that py-spy is asked about at a time."""
_EVERY_S = 1.0
_PAUSED_S = 5.0
"""The agent looks many times in a second. If it has not for so long, it stood still itself: Ctrl-Z, a laptop asleep."""


class StallWatch:
    """Of the ranks of one node. `timeout_s` 0: tells of none; None: each rank's limit is learned from its steps."""

    def __init__(self, folder: Path, timeout_s: float | None) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._rests: dict[tuple[int, int], Rest] = {}
        self._looks: list[tuple[int, RankWatch, Look]] = []
        self._next = 0.0
        self._looked = 0.0

    def stalled(self, watches: Collection[RankWatch], now: float) -> Iterator[Stalled]:
        """Ranks that have rested for too long, each once."""
        self._notice_pause(now)
        if now < self._next or self._timeout_s == 0:
            return
        self._next = now + _EVERY_S
        for key in self._rests.keys() - {(watch.rank, watch.attempt) for watch in watches if not watch.ended}:
            del self._rests[key]
        for watch in watches:
            state = watch.state() if not watch.ended else None
            if state is None:
                continue
            rest = self._rest(watch, state.batch, now)
            limit = self._limit(watch)
            if rest.is_told(state.phase, state.batch, limit, now):
                limit_s = rest.limit_s(state.batch, limit)
                yield Stalled(watch.where(state), round(rest.seconds(now), 1), round(limit_s, 1))

    def look(self, watches: Collection[RankWatch], number: int, now: float) -> None:
        """Look at all of these ranks; `seen` gives what comes of it."""
        for watch in watches:
            if not watch.ended:
                self._looks.append((number, watch, Look(self._folder, watch.rank, watch.attempt, watch.pid, now)))

    def seen(self, now: float) -> Iterator[RankLook]:
        """The looks that are finished."""
        due = [entry for entry in self._looks if entry[2].is_due(now, may_spy=self._may_spy())]
        self._looks = [entry for entry in self._looks if entry not in due]
        for number, watch, look in due:
            found = look.result(now)
            state = watch.state()
            if state is None or watch.ended:
                continue
            rest = self._rest(watch, state.batch, now)
            yield RankLook(
                where=watch.where(state),
                number=number,
                still_s=round(rest.seconds(now), 1),
                phase=state.phase,
                module=state.module,
                cls=state.cls,
                state=found.state,
                busy=found.busy,
                stack=found.stack,
                groups=watch.groups(),
                native=found.native,
                threads=found.threads,
                limit_s=round(rest.limit_s(state.batch, self._limit(watch), takes_long=takes_long(found.stack)), 1),
            )

    def _may_spy(self) -> bool:
        return sum(look.is_spying for _, _, look in self._looks) < MOST_SPYING

    def close(self) -> None:
        """Let go of looks that are not finished."""
        for _, _, look in self._looks:
            look.close()
        self._looks.clear()

    def _limit(self, watch: RankWatch) -> HangLimit:
        return learned_limit(watch.last_steps_s) if self._timeout_s is None else fixed_limit(self._timeout_s)

    def _notice_pause(self, now: float) -> None:
        if self._looked and now - self._looked > _PAUSED_S:
            for rest in self._rests.values():
                rest.paused(now - self._looked)
        self._looked = now

    def _rest(self, watch: RankWatch, batch: int, now: float) -> Rest:
        rest = self._rests.setdefault((watch.rank, watch.attempt), Rest(now))
        rest.moved(watch.movement(), batch, now)
        return rest
