"""Who waits for whom, and in what state a rank is, as a picture shows it. Pure."""

from __future__ import annotations

from typing import Literal, get_args

from ...core.wire.view import RankView

STILL_S = 3.0
"""So long a rank may rest before anything is said of it."""

State = Literal["overflow", "waited for", "failed", "at rest", "running", "ended"]
STATES: tuple[State, ...] = get_args(State)
"""The worst first."""


def behind_of(ranks: list[RankView]) -> set[int]:
    """The ranks that the others wait for: all rest, and these are in no collective and have begun the fewest.

    Nobody, while any rank moves, where all have begun as many, or where that is not known.
    """
    running = [rank for rank in ranks if not rank.ended]
    if len(running) < 2 or any(rank.still_s < STILL_S or rank.begun < 0 for rank in running):
        return set()
    fewest = min(rank.begun for rank in running)
    found = {rank.rank for rank in running if rank.begun == fewest and not rank.waits}
    others = [rank for rank in running if rank.rank not in found]
    return found if all(rank.waits and rank.begun > fewest for rank in others) and others else set()


def state_of(rank: RankView, behind: set[int]) -> State:
    """`behind` are the ranks that the others wait for."""
    if rank.overflow:
        return "overflow"
    if rank.rank in behind:
        return "waited for"
    if rank.ended:
        return "ended" if rank.exit in (0, None) else "failed"
    return "at rest" if rank.still_s >= STILL_S else "running"
