"""What the cause of an overflow is decided from, and the words for samples that stand out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.events import BadOperation, CauseTrial, OddSamples, SecondRun
from ..facts.diagnosis import LocalDiagnosis, number_text
from ..facts.facts import RunFacts
from .replicas import OddWeight, WildWeight


@dataclass(frozen=True)
class CauseClues:
    """What is known beside the diagnosis."""

    facts: RunFacts
    first: LocalDiagnosis
    odd: OddWeight | None = None
    """A copy of a weight that differs, and is blamed."""
    wild: WildWeight | None = None
    large: tuple[str, str] | None = None
    """(place, abs max) of the largest weight of a model that has not been trained yet, if it is very large."""
    ran: SecondRun | None = None
    operation: BadOperation | None = None
    """The one that made the value."""


def trial_of(trials: Sequence[CauseTrial], changed: str) -> CauseTrial | None:
    """The trial with that changed; None if there was none, or it did not run."""
    return next((each for each in trials if each.changed == changed and each.value), None)


def samples_text(odd: OddSamples) -> str:
    """`sample 6 of 8`, `samples 1, 2 and 5 of 64`"""
    *rest, last = map(str, odd.indices[:8])
    listed = f"{', '.join(rest)} and {last}" if rest else last
    more = f" and {len(odd.indices) - 8} more" if len(odd.indices) > 8 else ""
    return f"sample{'s' if rest else ''} {listed}{more} of {odd.size}"


def odd_text(odd: OddSamples, rank: int) -> str:
    """Which samples stand out, and how."""
    where = f"in {odd.role} of `{odd.module}`" if odd.module else f"in {odd.role} of the model"
    one = len(odd.indices) == 1
    how = {
        "large": f"{'has' if one else 'have'} abs max {number_text(odd.abs_max)}",
        "zero": f"{'is' if one else 'are'} all zero",
        "constant": f"{'is' if one else 'are'} constant ({number_text(odd.abs_max)})",
    }[odd.how]
    others = f"the others at most {number_text(odd.highest)}"
    return f"{samples_text(odd)} of this batch of rank {rank} {how} {where}, {others}"
