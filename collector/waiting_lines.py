"""What a job says of nodes that have not come, or whose clocks are off, from the facts so far. No clock, no pipe."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from ..core.codes import Code, coded
from .ends.missing_nodes import missing_nodes, unequal_nodes
from .facts.fold import FactFold

FIRST_S = 20.0
"""Nodes of one job rarely start within the same seconds."""
EVERY_S = 60.0
OWN_FILES = 64
"""Open files of the collector without any node: its libraries, the store, viewers."""


class WaitingLines:
    """`now` is monotonic time in seconds."""

    def __init__(self, folded: FactFold, most_files: int) -> None:
        """`most_files`: how many files this process may open; a connection is one."""
        self._folded = folded
        self._most_files = most_files
        self._told_files = False
        self._since: float | None = None
        self._next = 0.0
        self._unequal = ""

    def due(self, now: float, refused: int) -> Iterator[str]:
        """The sentences to say now. `refused`: how many clients were turned away for their keys."""
        facts = self._folded.as_it_stands()
        if facts.ranks or not facts.hellos:
            return
        needed = OWN_FILES + max(hello.max_nodes for hello in facts.hellos)
        if needed > self._most_files and not self._told_files:
            self._told_files = True
            yield coded(
                f"the collector may open {self._most_files} files, and a job of {needed - OWN_FILES} nodes needs "
                f"{needed}: some nodes will not be heard; raise it there (ulimit -Hn, LimitNOFILE of the service)",
                Code.COLLECTOR_ENDED,
            )
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


CLOCK_OFF_S = 60.0
"""torchrun's rendezvous takes a node whose clock is this far off for one that has gone."""


class ClockLines:
    """Each node once."""

    def __init__(self, folded: FactFold) -> None:
        self._folded = folded
        self._told: set[str] = set()

    def due(self, now: datetime) -> Iterator[str]:
        """The sentences to say now. `now` is this host's time."""
        for node in self._folded.as_it_stands().nodes.values():
            if node.clock is None or node.agent in self._told:
                continue
            off_s = -node.clock[0] / 1e9
            if abs(off_s) > CLOCK_OFF_S:
                self._told.add(node.agent)
                there = now + timedelta(seconds=off_s)
                yield coded(
                    f"the clock of {node.name} is {off_s:+.0f} s off this host's ({there:%H:%M:%S} there, "
                    f"{now:%H:%M:%S} here): torchrun may take its node for gone, and train with fewer; set both by NTP",
                    Code.CLOCK_OFF,
                )
