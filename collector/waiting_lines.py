"""What a job says while it waits for nodes that have not come, from the facts so far. No clock, no pipe."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.errors import Code, coded
from .decide.missing_nodes import missing_nodes, unequal_nodes
from .facts.fold import FactFold

FIRST_S = 20.0
"""Nodes of one job rarely start within the same seconds."""
EVERY_S = 60.0


class WaitingLines:
    """`now` is monotonic time in seconds."""

    def __init__(self, folded: FactFold) -> None:
        self._folded = folded
        self._since: float | None = None
        self._next = 0.0
        self._unequal = ""

    def due(self, now: float, refused: int) -> Iterator[str]:
        """The sentences to say now. `refused`: how many clients were turned away for their keys."""
        facts = self._folded.as_it_stands()
        if facts.ranks or not facts.hellos:
            return
        if (unequal := unequal_nodes(facts)) and unequal != self._unequal:
            self._unequal = unequal
            yield coded(
                f"{unequal}; the job may start too small, or wait for ever: give all nodes the same", Code.NO_RENDEZVOUS
            )
        if self._since is None:
            self._since, self._next = now, now + FIRST_S
        missing = missing_nodes(facts)
        if missing and now >= self._next:
            self._next = now + EVERY_S
            others = ""
            if refused:
                others = f"; {refused} connections with another key were refused: compare --rdzv-id and the secrets"
            yield coded(f"waiting for {missing}, for {now - self._since:.0f} s{others}", Code.NO_RENDEZVOUS)
