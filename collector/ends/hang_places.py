"""The lines of the script where ranks stand, for the sentences about a hang. Pure.

The first two lines of a terminal of 80 columns are to show who waits for whom, and the line. The evidence has each line
with its code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.events.rank_standing import GroupState
from ...core.recorder.operation_mismatch import IssuedKind, OperationMismatch
from ...core.text import joined, ranks_text
from .hang_model import RankPosition

FIRST_LINES = 2 * 80 - len("gpuwatch: ")
"""Characters that these two lines hold."""
_MOST_LINES = 2
"""Lines of one sentence's ranks that are named there."""


def who_waits(ranks: Sequence[int], waited: str) -> str:
    """`ranks 0, 2 have waited for 300 s`"""
    return f"{ranks_text(list(ranks))} {waited.replace('have', 'has', 1) if len(ranks) == 1 else waited}"


def capital(ranks: Sequence[int], one: str, many: str) -> str:
    """`Rank 1 waits`, `Ranks 1, 2 wait`"""
    return f"{ranks_text(list(ranks)).capitalize()} {one if len(ranks) == 1 else many}"


def lines_text(ranks: Sequence[int], positions: Mapping[int, RankPosition]) -> str:
    """` at train.py:41 and eval.py:7`; "" where a line is unknown, or they are more than two."""
    places = list(dict.fromkeys(positions[rank].place if rank in positions else "" for rank in ranks))
    return f" at {joined(places)}" if all(places) and 0 < len(places) <= _MOST_LINES else ""


def whereabouts(
    ranks: list[int], positions: Mapping[int, RankPosition], missed: str, waiting: str, *, ended: bool
) -> str:
    """`Rank 1 is at train.py:41 in main, after batch 4: time.sleep(9). It never reached all_reduce, in which ...`

    `missed`: what they all did not do. Where a terminal's first lines would not hold it up to those who are `waiting`,
    the code of the line is left out, then where in a step that is, then all but the place. What is stopped is told so.
    Several ranks are together, or at lines of their own.
    """
    one, known = len(ranks) == 1, [positions[rank] for rank in ranks if rank in positions]
    are = ("was" if one else "were") if ended else ("is" if one else "are")
    it = "It" if one else "They"
    alike = [{each.what for each in known}, {each.what_short for each in known}, {each.what_least for each in known}]
    told = [each.pop() for each in alike if len(each) == 1] if len(known) == len(ranks) else []
    if not any(each.kind == "stopped" for each in known):
        told.append(lines_text(ranks, positions).strip())
    sentences = [f"{capital(ranks, are, are)} {what}. {it} {missed}" for what in told if what]
    sentences = sentences or [f"{ranks_text(ranks).capitalize()} {missed}"]
    after = len(missed.partition(waiting)[2])
    return next((each for each in sentences if len(each) - after <= FIRST_LINES), sentences[-1])


@dataclass(frozen=True)
class IssuedPlaces:
    """Where ranks issued an operation, as far as their stacks show it."""

    positions: Mapping[int, RankPosition]
    places: Mapping[int, tuple[GroupState, int]]
    """Rank -> the group in which it stands, and the number of the operation there."""
    over: bool
    """All of them have ended since."""

    def text(self, found: OperationMismatch, kind: IssuedKind, ranks: list[int]) -> str:
        """` at train.py:41` where they stand in that call; ` (now at train.py:44)` where they went on, or only wait."""
        at = lines_text(ranks, self.positions)
        if not at or all(self._stands_in(found, kind, rank) for rank in ranks):
            return at
        return f" ({'last' if self.over else 'now'}{at})"

    def _stands_in(self, found: OperationMismatch, kind: IssuedKind, rank: int) -> bool:
        state, number = self.places.get(rank, (None, 0))
        here = state is not None and state.name == found.group and number == found.number
        return here and self.positions[rank].operation == kind[0]
