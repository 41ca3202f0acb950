"""All that is told while the job still runs: the verdict so far, a forecast, a slow rank.

An error in one of them is logged, once; it costs neither the others nor the report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...core.wire.messages import AgentBody
from ...core.wire.view import SlowRank
from ..facts.fold import Fold
from .forecast import LiveForecast
from .stragglers import LiveStragglers
from .verdict import LiveVerdict


class _Part(Protocol):
    def hear(self, body: AgentBody) -> None:
        """What was added to the fold."""

    def tick(self) -> None:
        """Tell what is new, if it is time."""


class Live:
    """`say` is given what the user should know, `log` what the log is for."""

    def __init__(self, folded: Fold, say: Callable[[str], object], log: Callable[[str], object]) -> None:
        self._log = log
        self._verdict = LiveVerdict(folded, log)
        self._stragglers = LiveStragglers(folded, say)
        self._parts: list[_Part] = [self._verdict, LiveForecast(folded, say), self._stragglers]
        self._errors: set[str] = set()

    @property
    def verdict_so_far(self) -> str:
        """ "" where there is none."""
        return self._verdict.said

    @property
    def slow(self) -> SlowRank | None:
        """The rank that the others wait for in their steps."""
        return self._stragglers.slow

    def hear(self, body: AgentBody) -> None:
        """What was added to the fold."""
        self._each(lambda part: part.hear(body))

    def tick(self) -> None:
        """After what has come at once."""
        self._each(lambda part: part.tick())

    def _each(self, do: Callable[[_Part], None]) -> None:
        for part in self._parts:
            try:
                do(part)
            except Exception as error:
                self._failed(part, error)

    def _failed(self, part: _Part, error: Exception) -> None:
        line = f"{type(part).__name__} has failed: {type(error).__name__}: {error}"
        if line not in self._errors:
            self._errors.add(line)
            self._log(line)
