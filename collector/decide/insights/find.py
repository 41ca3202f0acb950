"""All insights of one attempt, the most harmful first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...facts.facts import RunFacts
from ...facts.kept_history import OpenHistory
from .drift import replica_drift
from .growth import growth
from .insight import Insight
from .over_batches import dead_modules, ranks_unlike
from .rows import scaler_collapsing, warned_rows

ORDER = (
    "replica_drift",
    "scaler_collapsing",
    "growth",
    "near_overflow",
    "rank_unlike",
    "no_scaler",
    "dead_module",
    "scaler_too_small",
    "underflow",
    "unknown",
)


def find_insights(facts: RunFacts, attempt: int, opened: dict[int, OpenHistory]) -> list[Insight]:
    """What values near trouble come to. One kind that cannot be told costs the others nothing.

    `opened`: the histories of ranks, by rank.
    """
    ranks = facts.of_attempt(attempt)
    kinds: list[Callable[[], Iterator[Insight]]] = [
        lambda: replica_drift(facts, ranks),
        lambda: scaler_collapsing(ranks),
        lambda: growth(ranks),
        lambda: warned_rows(ranks),
        lambda: ranks_unlike(opened),
        lambda: dead_modules(opened),
    ]
    found: list[Insight] = []
    for kind in kinds:
        try:
            found += kind()
        except Exception as error:  # it is made of what came over the network; the report must be written all the same
            found.append(Insight("unknown", f"one kind could not be told: {type(error).__name__}: {error}", "", [], []))
    return sorted(found, key=lambda insight: ORDER.index(insight.kind))
