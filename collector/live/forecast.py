"""The forecast while the job still runs: a sentence for the user and the log, once for a run."""

from __future__ import annotations

from collections.abc import Callable

from ...core.records import Forecast
from ...core.wire.messages import AgentBody, EventMessage
from ..decide.insights.growth import is_sound, limit_text, passing_text
from ..facts.fold import Fold
from ..facts.shown_body import shown_body


class LiveForecast:
    """`say` is given the sentence. A run that `folded` knows a forecast of has told it before."""

    def __init__(self, folded: Fold, say: Callable[[str], object]) -> None:
        self._say = say
        self._told = folded.has_forecasts

    def hear(self, body: AgentBody) -> None:
        """One message that came in."""
        if self._told or not isinstance(body, EventMessage) or not isinstance(body.event, Forecast):
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
