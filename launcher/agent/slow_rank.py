"""Looks at a rank that the others wait for: at which line of the script it is while it waits for nobody itself.

The collector finds the slow rank (collector/so_far.py), and asks its node's agent. The looks are spread over all of the
rank's own time. While the others wait would be too late: what a rank does last is not what it takes longer for.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ...core.events.agent_events import SeenLine, SlowRankLooks
from ...core.events.rank_standing import StackLine
from ...core.events.run_position import RunPosition
from ...core.recorder.stalls import is_users
from ...core.wire.messages import WatchSlowRank
from .rank_watch import RankWatch
from .stacks import StackLook

# The line of a look. Pure.

_TRAINS = ("script", "forward", "backward", "optimizer")
_BETWEEN = ("_wrapped_call_impl", "_call_impl")
"""Every call of a module goes through these."""
_OWN_HOOKS = "/worker/hooks/"


def own_line(stack: Sequence[StackLine]) -> tuple[StackLine | None, str]:
    """The innermost line of the user's own code, and what it calls there: `__next__ of dataloader.py`."""
    at = next((n for n, line in enumerate(stack) if is_users(line.shown)), None)
    if at is None:
        return None, ""
    called = (line for line in reversed(stack[:at]) if line.function not in _BETWEEN and _OWN_HOOKS not in line.file)
    inner = next(called, None)
    return stack[at], f"{inner.function} of {inner.file.rpartition('/')[2]}" if inner is not None else ""


class LineCounts:
    """How often a rank was at each line."""

    def __init__(self) -> None:
        self.looks = 0
        self._lines: Counter[StackLine] = Counter()
        self._calls: dict[StackLine, Counter[str]] = {}

    def add(self, stack: Sequence[StackLine]) -> None:
        """One look."""
        self.looks += 1
        line, calls = own_line(stack)
        if line is not None:
            self._lines[line] += 1
            self._calls.setdefault(line, Counter())[calls] += 1

    def lines(self, most: int) -> list[SeenLine]:
        """The most frequent ones first."""
        return [
            SeenLine(line, count, self._calls[line].most_common(1)[0][0])
            for line, count in self._lines.most_common(most)
        ]


# When it looks, and how often.

MOST_LOOKS = 60
"""In a run, at all ranks of this node."""
EVERY_S = 1.0
"""At the most often. Up to half as long again, drawn, so that a step of one second is not always seen at one place."""
ANSWER_S = 0.3
_TOLD_EACH = 10
_MOST_LINES = 8


class SlowRankWatch:
    """Asks for looks at the slow rank, and counts what they show."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked = WatchSlowRank(0)
        self._left = MOST_LOOKS
        self._next = 0.0
        self._look: tuple[RankWatch, RunPosition, StackLook] | None = None
        self._counts: dict[tuple[int, int], LineCounts] = {}
        self._told: dict[tuple[int, int], int] = {}
        self._draw = random.Random()  # its own: nobody sees the numbers

    def ask(self, asked: WatchSlowRank) -> None:
        """Which rank the others wait for now."""
        self._asked = asked

    def turn(self, watches: Collection[RankWatch], now: float) -> Iterator[SlowRankLooks]:
        """Begin or end a look; the counts so far, now and then."""
        if self._look is not None:
            watch, where, look = self._look
            if not look.is_due(now, may_spy=False, look_s=ANSWER_S):
                return
            self._look = None
            if stack := look.result().stack:
                key = watch.rank, watch.attempt
                counts = self._counts.setdefault(key, LineCounts())
                counts.add(stack)
                if counts.looks % _TOLD_EACH == 0:
                    yield from self.told(watch, where)
        elif self._left > 0 and now >= self._next and (slow := self._slow(watches)) is not None:
            watch, where = slow
            look = StackLook(self._folder, watch.rank, watch.attempt, watch.pid, now)
            self._left -= 1
            self._next = now + EVERY_S * (1 + self._draw.random() / 2)
            if look.was_asked:
                self._look = watch, where, look

    def told(self, watch: RankWatch, where: RunPosition | None = None) -> Iterator[SlowRankLooks]:
        """What was counted of a rank, unless it was reported."""
        key = watch.rank, watch.attempt
        counts = self._counts.get(key)
        if counts is not None and counts.looks > self._told.get(key, 0):
            self._told[key] = counts.looks
            place = where if where is not None else RunPosition(watch.rank, watch.attempt)
            yield SlowRankLooks(place, counts.looks, counts.lines(_MOST_LINES))

    def _slow(self, watches: Collection[RankWatch]) -> tuple[RankWatch, RunPosition] | None:
        """The slow rank, if it runs on this node and waits for nobody."""
        asked = self._asked
        watch = next((one for one in watches if (one.rank, one.attempt) == (asked.rank, asked.attempt)), None)
        state = watch.state() if watch is not None and not watch.ended else None
        if watch is None or state is None or state.phase not in _TRAINS:
            return None
        waits = any(group.phase in ("issuing", "waiting") for group in watch.groups())
        return (watch, watch.where(state)) if not waits else None
