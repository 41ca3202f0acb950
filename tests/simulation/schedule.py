"""What a seed stands for: the shape of a job, and what goes wrong in it, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from gpuwatch.core.recorder.layout import HeadField

IN_A_CALL = (
    "bad",
    "bad, late",
    "late",
    "fault",
    "detach",
    "compiled",
    "unmeasured",
    "rows lost",
    "exit in a forward",
    "exit",
    "kill",
    "raise",
    "warn",
    "full log",
    "thread",
    "exec",
    "child",
    "calling child",
    "hooks cleared",
)
"""Happen at one call of one rank in one attempt."""
AT_THE_START = ("no recorder", "hooks failed", "never started")
"""Happen to one rank in one attempt before its first call."""
AROUND = (
    "agent dies",
    "agent dies for good",
    "connection lost",
    "collector dies",
    "store lost",
    "node never comes",
    "head damaged",
    "log damaged",
    "store damaged",
    "ring damaged",
    "end not told",
)
"""Happen to a node, the collector, or a file, at any step."""
HARMLESS = frozenset({"agent dies", "connection lost", "collector dies", "store lost", "warn"})
"""After these, a job in which nothing else went wrong is still clean, and that is established."""
NEEDS = {
    "full log": "FAULTS",
    "log damaged": "FAULTS",
    "thread": "CALLS_LEFT_OUT",
    "hooks cleared": "HOOKS_GONE",
    "exec": "LEFT",
    "exit": "LEFT",
    "restart": "LEFT",
    "child": "UNSEEN_CHILD",
    "calling child": "CALLING_CHILD",
}
"""Event -> the field of a recorder's head that shows it. The event is drawn only if this version has the field."""


@dataclass
class Schedule:
    """Drawn from a seed. `draw` goes on to order the steps."""

    seed: int
    only: tuple[str, ...] = ()
    """Draw these alone."""
    draw: Random = field(init=False)
    nodes: list[int] = field(init=False)
    """Ranks of each."""
    attempts: int = field(init=False)
    batches: int = field(init=False)
    calls: int = field(init=False)
    """In each batch."""
    every: int = field(init=False)
    in_calls: dict[tuple[int, int, int], str] = field(init=False)
    """(attempt, rank, number of the call) -> what happens there"""
    at_start: dict[tuple[int, int], str] = field(init=False)
    """(attempt, rank) -> what"""
    around: list[tuple[int, str]] = field(init=False)
    """(step, what)"""

    def __post_init__(self) -> None:
        draw = self.draw = Random(self.seed)
        self.nodes = draw.choice([[1], [2], [3], [1, 1], [2, 1]])
        self.attempts = draw.choice((2, 2, 3, 6)) if draw.random() < 0.25 and is_drawn("restart") else 1
        self.batches = draw.randint(1, 3)
        self.calls = draw.randint(1, 3)
        self.every = 2 if draw.random() < 0.1 else 1
        self.in_calls, self.at_start, self.around = {}, {}, []
        for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 4))):
            self._inject(draw)

    @property
    def world_size(self) -> int:
        return sum(self.nodes)

    @property
    def injected(self) -> list[str]:
        """All that goes wrong."""
        restart = ["restart"] if self.attempts > 1 else []
        return [*self.in_calls.values(), *self.at_start.values(), *(what for _, what in self.around), *restart]

    def _inject(self, draw: Random) -> None:
        kinds = [kind for kind in (*IN_A_CALL, *AT_THE_START, *AROUND) if is_drawn(kind)]
        kind = draw.choice([kind for kind in kinds if kind in self.only] or kinds)
        place = draw.randrange(self.attempts), draw.randrange(self.world_size)
        if kind in IN_A_CALL:
            self.in_calls[(*place, draw.randrange(self.batches * self.calls))] = kind
        elif kind in AT_THE_START:
            self.at_start[place] = kind
        else:
            self.around.append((draw.randrange(60), kind))
            if draw.random() < 0.5:  # something that the failure may hide
                self.in_calls[(*place, draw.randrange(self.batches * self.calls))] = draw.choice(
                    [kind for kind in IN_A_CALL if is_drawn(kind)]
                )


def is_drawn(kind: str) -> bool:
    """Whether gpuwatch can know of it."""
    return NEEDS.get(kind, "MAGIC") in HeadField.__members__
