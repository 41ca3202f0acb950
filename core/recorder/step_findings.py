"""What the pages of a rank show of its optimizer steps: what they led to, and which parts of the model do not learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..events.agent_events import StoppedGradient, UnmovedParts, UnmovedWeights, ZeroedGradients
from ..events.definitions import Definition
from ..wire.messages import PageMessage
from .gradient_stops import GradientStops
from .page_tables import PageTables
from .slot_owners import SlotOwners
from .step_effects import StepEffects
from .unmoved_parts import PartSteps

StepEvent = ZeroedGradients | UnmovedWeights | StoppedGradient | UnmovedParts


class StepFindings:
    """All that is found in the steps of one rank. It is fed with pages that are over, in any order."""

    def __init__(self) -> None:
        self._slots = SlotOwners()
        self._readers = StepEffects(self._slots), GradientStops(self._slots), PartSteps(self._slots)

    def define(self, entries: Iterable[Definition]) -> None:
        """New definitions of the rank."""
        self._slots.define(entries)

    def add(self, message: PageMessage, page: PageTables) -> None:
        """Read one page. Of one whose numbers are still on their way, what these would show is not known."""
        for each in self._readers:
            each.add(message, page)

    def events(self, rank: int, attempt: int) -> Iterator[StepEvent]:
        """What was found so far."""
        for each in self._readers:
            yield from each.events(rank, attempt)
