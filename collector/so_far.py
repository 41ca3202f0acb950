"""Lines in the collector's log while the job still runs: the verdict so far, a forecast, a slow rank.

An error in one of them is logged, once; it costs neither the others nor the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy

from ..core.codes import Code, coded
from ..core.events.agent_events import LimitForecast
from ..core.events.alarms import Anomaly
from ..core.recorder.layout import PARTS
from ..core.wire.beat import NodeBeat, RankState
from ..core.wire.messages import AgentBody, EventMessage, PageMessage, WatchSlowRank
from ..core.wire.view import ViewStraggler
from .assemble.stragglers import LEAST_STEPS, PART_TEXT, WARM_UP, SlowRank, find_slow_now
from .assemble.timeline import is_sound, limit_text, passing_text, utc
from .decide.overflow_at_rest import RestingOverflow, overflow_at_rest
from .decide.overflow_verdict import overflow_verdict
from .facts.fold import FactFold
from .facts.shown_body import shown_body
from .report.sentence_parts import one_on
from .report.verdict import Verdict

# The verdict over an overflow while the job still runs: one line in the collector's log each time that it changes.
#
# 2026-11-22T04:05:06.123Z the verdict so far: supported: Rank 3 on gpu-2 overflowed first: +inf in the output of ...
#
# It rests on the messages received so far. Pages of other ranks can still change it.

_SHARE = 0.2
"""The share of one processor that pages may take, or of the time if it has less than one processor."""
_SHARE_OF_ANOMALIES = 0.5
"""The same for ranks with an anomaly, for which up to `_MOST_SAVED_S` is saved."""
_MOST_SAVED_S = 1.0
_MOST_DIAGNOSED = 8
"""Ranks whose pages are read for one decision, 10 ms each: new messages wait meanwhile."""


class LiveVerdict:
    """`say` receives the lines. `clock` is monotonic, `used` is processor time of this thread, `now` is the time."""

    def __init__(
        self,
        folded: FactFold,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folded, self._say = folded, say
        self._clock, self._used, self._now = clock, used, now
        self._any = False
        self._changed = self._urgent = False
        self._due = 0.0
        self._saved, self._saved_at = _MOST_SAVED_S, clock()
        self.said = ""
        """The last line without its time; "" before there is one."""

    def on_message(self, body: AgentBody) -> None:
        """What was added to the fold."""
        if isinstance(body, EventMessage) and isinstance(body.event, Anomaly):
            self._any = self._changed = self._urgent = True
        elif isinstance(body, PageMessage):
            self._changed = self._any

    def tick(self) -> None:
        """Decide again, if there is something new and it is time."""
        if not self._changed or not self._is_time():
            return
        began, before = self._clock(), self._used()
        self._changed = self._urgent = False
        try:
            self._decide()
        finally:
            took, now = self._used() - before, self._clock()
            self._due = now + max(took, now - began) / _SHARE
            self._saved -= took

    def at_rest(self) -> RestingOverflow | None:
        """Decide now, as no rank moves: over pages that their ranks could not judge, too."""
        self._any = True
        return overflow_at_rest(self._folded.as_it_stands(), self._decide())

    def _decide(self) -> Verdict | None:
        verdict = overflow_verdict(self._folded.facts(most_diagnosed=_MOST_DIAGNOSED))
        self._changed = self._folded.is_behind
        line = f"the verdict so far: {verdict.certainty}: {verdict.statement}" if verdict is not None else self.said
        if line != self.said:
            self.said = line
            self._say(f"{utc(self._now(), 'milliseconds')} {line}")
        return verdict

    def _is_time(self) -> bool:
        now = self._clock()
        self._saved = min(_MOST_SAVED_S, self._saved + (now - self._saved_at) * _SHARE_OF_ANOMALIES)
        self._saved_at = now
        return now >= self._due or (self._urgent and self._saved > 0)


# The forecast while the job still runs: a sentence for the user and the log, once for a run.


class LiveForecast:
    """`say` receives the sentence. If `folded` has a forecast, an earlier collector has reported it."""

    def __init__(self, folded: FactFold, say: Callable[[str], object]) -> None:
        self._say = say
        self._told = any(rank.forecasts for rank in folded.as_it_stands().ranks.values())

    def on_message(self, body: AgentBody) -> None:
        """One message that came in."""
        if self._told or not isinstance(body, EventMessage) or not isinstance(body.event, LimitForecast):
            return
        told = shown_body(body.event)
        if is_sound(told):
            self._told = True
            grow = f"outputs grow towards {told.dtype}'s limit of {limit_text(told.limit)}"
            then = f"{passing_text(told)}, if it goes on as since batch {told.since}"
            text = f"rank {told.where.rank}: {grow}: in batch {told.where.batch} {then}"
            self._say(coded(text, Code.GROWTH))


# A slow rank while the job runs: one line when the others begin to wait for a rank, or do so no more.
#
# Rank 3 on gpu-2 costs the job 24% of its time now: the others wait for it. Most of the difference is in the forward.
#
# Each beat holds the number of steps that a rank has timed and the time of each part so far. The collector compares the
# increments of all ranks since its last comparison. It reports a rank only if two successive comparisons agree.

LEAST_S = 10.0
"""Ranks are compared over this time at least, and over `LEAST_STEPS` steps of each."""
_LOOK_S = 1.0
_MOST_US = 1 << 53


class LiveStragglers:
    """`folded` knows the ranks' hosts, `say` receives the lines, `clock` is monotonic."""

    def __init__(
        self, folded: FactFold, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folded, self._say, self._clock = folded, say, clock
        self._attempt = -1
        self._newest: dict[int, RankState] = {}
        self._before: dict[int, RankState] = {}
        """By rank: at the last comparison."""
        self._due = 0.0
        self._seen: SlowRank | None = None
        """The result of the last comparison, and the last one reported."""
        self._told: SlowRank | None = None
        self.slow: ViewStraggler | None = None
        """The slow rank now, if the last two comparisons agree."""
        self.watched = WatchSlowRank(-1)
        """Whom its node's agent is to look at: that one."""

    def on_message(self, body: AgentBody) -> None:
        """Take the step times of a beat."""
        if not isinstance(body, NodeBeat):
            return
        for state in body.ranks:
            if state.attempt > self._attempt:
                self._attempt = state.attempt
                self._newest, self._before, self._seen, self._told, self.slow = {}, {}, None, None, None
                self.watched = WatchSlowRank(self._attempt)
            if state.attempt == self._attempt:
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
            states = self._newest.values()
            all_are_here = 1 < max(state.world_size for state in states) == len(states) and all(map(_is_timed, states))
            if all_are_here and min(state.steps_timed for state in states) >= WARM_UP:
                self._begin(now)
            return
        ranks = sorted(self._before)
        stretches = [(self._before[rank], self._newest[rank]) for rank in ranks]
        steps = numpy.array([after.steps_timed - before.steps_timed for before, after in stretches])
        if steps.min() < LEAST_STEPS or not all(_is_timed(after) for _, after in stretches):
            return
        parts = numpy.array([numpy.subtract(after.parts_us, before.parts_us) for before, after in stretches])
        means = parts / 1e6 / steps[:, None]
        self._begin(now)
        slow = find_slow_now(ranks, means)
        if _rank_of(slow) == _rank_of(self._seen):
            self.slow = ViewStraggler(slow.rank, self._host(slow.rank), slow.cost) if slow is not None else None
            self.watched = WatchSlowRank(self._attempt, slow.rank if slow is not None else -1)
            self._tell(slow)
        self._seen = slow

    def _begin(self, now: float) -> None:
        self._before = dict(self._newest)
        self._due = now + LEAST_S

    def _tell(self, slow: SlowRank | None) -> None:
        before = self._told
        if _rank_of(slow) == _rank_of(before) and (slow is None or before is None or before.loud or not slow.loud):
            return
        self._told = slow
        if slow is None:
            assert before is not None
            self._say(f"The others no longer wait for rank {before.rank}.")
            return
        part = f" Most of the difference is {PART_TEXT[slow.part]}." if slow.part else ""
        who = f"{'WARNING: ' if slow.loud else ''}{one_on(slow.rank, self._host(slow.rank))}"
        text = f"{who} costs the job {slow.cost:.0%} of its time now: the others wait for it.{part}"
        self._say(coded(text, Code.STRAGGLER))

    def _host(self, number: int) -> str:
        facts = self._folded.as_it_stands()
        rank = facts.named(self._attempt, number)
        return facts.host(rank) if rank is not None else ""


def _is_timed(state: RankState) -> bool:
    return len(state.parts_us) == len(PARTS) and all(0 <= us < _MOST_US for us in state.parts_us)


def _rank_of(told: SlowRank | None) -> int | None:
    return told.rank if told is not None else None


class LiveFindings:
    """`say` receives sentences for the user, `forecast` the forecast, `log` lines for the log."""

    def __init__(
        self,
        folded: FactFold,
        say: Callable[[str], object],
        log: Callable[[str], object],
        forecast: Callable[[str], object],
    ) -> None:
        self._log = log
        self.verdict, self.stragglers = LiveVerdict(folded, log), LiveStragglers(folded, say)
        self._forecast = LiveForecast(folded, forecast)
        self._errors: set[str] = set()

    def on_message(self, body: AgentBody) -> None:
        """What was added to the fold."""
        for part in (self.verdict, self._forecast, self.stragglers):
            with self._alone(part):
                part.on_message(body)

    def tick(self) -> None:
        """Report changes, once the messages that arrived together are heard."""
        for part in (self.verdict, self.stragglers):
            with self._alone(part):
                part.tick()

    def overflow_at_rest(self) -> RestingOverflow | None:
        """What is known of an overflow, now that no rank moves."""
        known: list[RestingOverflow | None] = []
        with self._alone(self.verdict):
            known.append(self.verdict.at_rest())
        return known[0] if known else None

    @contextmanager
    def _alone(self, part: object) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            line = f"{type(part).__name__} has failed: {type(error).__name__}: {error}"
            if line not in self._errors:
                self._errors.add(line)
                self._log(line)
