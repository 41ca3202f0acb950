"""All that is told while the job still runs: the verdict so far, a forecast, a slow rank.

An error in one of them is logged, once; it costs neither the others nor the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ...core.events import Anomaly, LimitForecast
from ...core.wire.messages import AgentBody, EventMessage, PageMessage
from ...core.wire.view import ViewStraggler
from ..assemble.forecasts import is_sound, limit_text, passing_text
from ..assemble.timeline import utc
from ..decide.overflow_verdict import overflow_verdict
from ..facts.fold import FactFold, shown_body
from .straggler_notices import LiveStragglers

# The verdict over an overflow while the job still runs: one line in the collector's log each time that it changes.
#
# 2026-11-22T04:05:06.123Z the verdict so far: supported: Rank 3 on gpu-2 overflowed first: +inf in the output of ...
#
# It is made of what has come so far. Pages of other ranks can still change it.

_SHARE = 0.2
"""So much of one processor, and of the time where it has less than one, it may take for pages."""
_SHARE_OF_ANOMALIES = 0.5
"""So much for ranks that have met something: it saves up to `_MOST_SAVED_S` for them."""
_MOST_SAVED_S = 1.0
_MOST_DIAGNOSED = 8
"""Ranks of which pages are read for one decision, 10 ms each: what comes meanwhile waits."""


class LiveVerdict:
    """`say` is given the lines. `clock` is monotonic, `used` is processor time of this thread, `now` is the time."""

    def __init__(
        self,
        folded: FactFold,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folded = folded
        self._say = say
        self._clock = clock
        self._used = used
        self._now = now
        self._any = False
        self._changed = self._urgent = False
        self._due = 0.0
        self._saved, self._saved_at = _MOST_SAVED_S, clock()
        self._said = ""

    @property
    def said(self) -> str:
        """The last line without its time; "" before there is one."""
        return self._said

    def hear(self, body: AgentBody) -> None:
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

    def _decide(self) -> None:
        verdict = overflow_verdict(self._folded.facts(most_diagnosed=_MOST_DIAGNOSED))
        self._changed = self._folded.is_behind
        if verdict is None:
            return
        line = f"the verdict so far: {verdict.certainty}: {verdict.statement}"
        if line != self._said:
            self._said = line
            self._say(f"{utc(self._now(), 'milliseconds')} {line}")

    def _is_time(self) -> bool:
        now = self._clock()
        self._saved = min(_MOST_SAVED_S, self._saved + (now - self._saved_at) * _SHARE_OF_ANOMALIES)
        self._saved_at = now
        return now >= self._due or (self._urgent and self._saved > 0)


# The forecast while the job still runs: a sentence for the user and the log, once for a run.


class LiveForecast:
    """`say` is given the sentence. A run that `folded` knows a forecast of has told it before."""

    def __init__(self, folded: FactFold, say: Callable[[str], object]) -> None:
        self._say = say
        self._told = folded.has_forecasts

    def hear(self, body: AgentBody) -> None:
        """One message that came in."""
        if self._told or not isinstance(body, EventMessage) or not isinstance(body.event, LimitForecast):
            return
        told = shown_body(body.event)
        if not is_sound(told):
            return
        self._told = True
        self._say(
            f"rank {told.where.rank}: outputs grow towards {told.dtype}'s limit of {limit_text(told.limit)}: in batch "
            f"{told.where.batch} {passing_text(told)}, if it goes on as since batch {told.since}"
        )

    def tick(self) -> None:
        """Nothing waits for its time."""


class _TimeShare(Protocol):
    def hear(self, body: AgentBody) -> None:
        """What was added to the fold."""

    def tick(self) -> None:
        """Tell what is new, if it is time."""


class LiveFindings:
    """`say` is given what the user should know, `log` what the log is for."""

    def __init__(self, folded: FactFold, say: Callable[[str], object], log: Callable[[str], object]) -> None:
        self._log = log
        self._verdict = LiveVerdict(folded, log)
        self._stragglers = LiveStragglers(folded, say)
        self._parts: list[_TimeShare] = [self._verdict, LiveForecast(folded, say), self._stragglers]
        self._errors: set[str] = set()

    @property
    def verdict_so_far(self) -> str:
        """ "" where there is none."""
        return self._verdict.said

    @property
    def slow(self) -> ViewStraggler | None:
        """The rank that the others wait for in their steps."""
        return self._stragglers.slow

    def hear(self, body: AgentBody) -> None:
        """What was added to the fold."""
        self._each(lambda part: part.hear(body))

    def tick(self) -> None:
        """After what has come at once."""
        self._each(lambda part: part.tick())

    def _each(self, do: Callable[[_TimeShare], None]) -> None:
        for part in self._parts:
            try:
                do(part)
            except Exception as error:
                self._failed(part, error)

    def _failed(self, part: _TimeShare, error: Exception) -> None:
        line = f"{type(part).__name__} has failed: {type(error).__name__}: {error}"
        if line not in self._errors:
            self._errors.add(line)
            self._log(line)
