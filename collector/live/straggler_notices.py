"""A slow rank while the job runs: one line when a rank has become the one that the others wait for, or is no more.

    Rank 3 on gpu-2 costs the job 24% of its time now: the others wait for it. Most of the difference is in the forward.

Each beat has how many steps a rank has timed and the time of each part so far. The collector compares what all ranks
have added since it last compared. Only what two comparisons say, one after the other, is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy

from ...core.recorder.layout import PARTS
from ...core.wire.messages import AgentBody, NodeBeat, RankState
from ...core.wire.view import ViewStraggler
from ..assemble.stragglers import LEAST_STEPS, PART_TEXT, WARM_UP, SlowRank, find_slow_now
from ..facts.fold import FactFold

LEAST_S = 10.0
"""Ranks are compared over this time at least, and over `LEAST_STEPS` steps of each."""
_LOOK_S = 1.0
_MOST_US = 1 << 53


class LiveStragglers:
    """`folded` knows the ranks' hosts, `say` is given the lines, `clock` is monotonic."""

    def __init__(
        self, folded: FactFold, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folded = folded
        self._say = say
        self._clock = clock
        self._attempt = -1
        self._newest: dict[int, RankState] = {}
        self._before: dict[int, RankState] = {}
        """By rank: at the last comparison."""
        self._due = 0.0
        self._seen: SlowRank | None = None
        """What the last comparison has shown, and what was told last."""
        self._told: SlowRank | None = None
        self.slow: ViewStraggler | None = None
        """Who it is now, where the last two comparisons agree."""

    def hear(self, body: AgentBody) -> None:
        """A beat has where its ranks are."""
        if not isinstance(body, NodeBeat):
            return
        for state in body.ranks:
            if state.attempt > self._attempt:
                self._attempt = state.attempt
                self._newest, self._before, self._seen, self._told, self.slow = {}, {}, None, None, None
            if state.attempt == self._attempt:
                self._take(state)

    def _take(self, state: RankState) -> None:
        known = self._newest.get(state.rank)
        if known is not None and state.steps_timed < known.steps_timed:
            self._before = {}  # its agent was started again, and counts what the recorder still holds
        self._newest[state.rank] = state

    def tick(self) -> None:
        """Compare, if it is time and all ranks have gone on for long enough."""
        now = self._clock()
        if now < self._due or not self._newest:
            return
        self._due = now + _LOOK_S
        if not self._before:
            if self._all_are_here() and min(state.steps_timed for state in self._newest.values()) >= WARM_UP:
                self._begin(now)
            return
        ranks = sorted(self._before)
        more = [self._newest[rank].steps_timed - self._before[rank].steps_timed for rank in ranks]
        if min(more) < LEAST_STEPS or not all(_is_timed(self._newest[rank]) for rank in ranks):
            return
        means = numpy.array([self._mean(rank, steps) for rank, steps in zip(ranks, more, strict=True)])
        self._begin(now)
        slow = find_slow_now(ranks, means)
        if _rank_of(slow) == _rank_of(self._seen):
            self.slow = ViewStraggler(slow.rank, self._host(slow.rank), slow.cost) if slow is not None else None
            self._tell(slow)
        self._seen = slow

    def _all_are_here(self) -> bool:
        states = self._newest.values()
        world_size = max(state.world_size for state in states)
        return 1 < world_size == len(self._newest) and all(map(_is_timed, states))

    def _begin(self, now: float) -> None:
        self._before = dict(self._newest)
        self._due = now + LEAST_S

    def _mean(self, rank: int, steps: int) -> Any:
        parts = numpy.subtract(self._newest[rank].parts_us, self._before[rank].parts_us)
        return parts / 1e6 / steps

    def _tell(self, slow: SlowRank | None) -> None:
        before = self._told
        if _rank_of(slow) == _rank_of(before) and (slow is None or before is None or before.loud or not slow.loud):
            return
        self._told = slow
        if slow is None:
            assert before is not None
            self._say(f"Rank {before.rank} is no longer the one that the others wait for.")
            return
        host = self._host(slow.rank)
        where = f" on {host}" if host else ""
        part = f" Most of the difference is {PART_TEXT[slow.part]}." if slow.part else ""
        who = f"{'WARNING: ' if slow.loud else ''}Rank {slow.rank}{where}"
        self._say(f"{who} costs the job {slow.cost:.0%} of its time now: the others wait for it.{part}")

    def _host(self, number: int) -> str:
        facts = self._folded.as_it_stands()
        return next((facts.host(rank) for rank in facts.of_attempt(self._attempt) if rank.rank == number), "")


def _is_timed(state: RankState) -> bool:
    return len(state.parts_us) == len(PARTS) and all(0 <= us < _MOST_US for us in state.parts_us)


def _rank_of(told: SlowRank | None) -> int | None:
    return told.rank if told is not None else None
