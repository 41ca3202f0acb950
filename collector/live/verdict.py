"""The verdict over an overflow while the job still runs: one line in the collector's log each time that it changes.

    2026-11-22T04:05:06.123Z the verdict so far: supported: Rank 3 on gpu-2 overflowed first: +inf in the output of ...

It is made of what has come so far. Pages of other ranks can still change it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...core.records import Anomaly
from ...core.wire.messages import AgentBody, EventMessage, PageMessage
from ..decide.overflow.verdict import overflow_verdict
from ..facts.fold import Fold
from ..report.make.timeline import utc

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
        folded: Fold,
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
