"""report.json's `steps`: where the ranks' time goes, and a rank that the others wait for."""

from __future__ import annotations

import msgspec


class RankSteps(msgspec.Struct, frozen=True):
    """One rank: how many steps were timed, and the seconds of all of them in each part."""

    rank: int
    timed: int
    seconds: dict[str, float]


class Straggler(msgspec.Struct, frozen=True):
    """A rank that the others wait for."""

    rank: int
    host: str
    device: str | None
    cost: float
    """Share of the job's time."""
    loud: bool
    """It is a large share."""
    how: str
    """`constantly` or `now and then`"""
    part: str
    """outside, forward, backward, optimizer; "" if it is in no part alone"""
    text: str
    """One sentence or several."""
    beside: list[str] = []
    """How its host and its GPU did over the run, and what is known of its GPU since the preflight."""


class StepReport(msgspec.Struct, frozen=True):
    """report.json's `steps`."""

    ranks: list[RankSteps]
    compared: int = 0
    """Steps of all ranks that were compared; 0: too few."""
    step_s: float | None = None
    """Mean of those."""
    stragglers: list[Straggler] = []
    trouble: str = ""
    """Why it could not be told; "" where it could."""
