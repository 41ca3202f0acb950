"""The part of an overflow's verdict that stands in its diagnosis."""

from __future__ import annotations

from typing import Any

from ..diagnose.local_diagnosis import LocalDiagnosis
from ..facts import RunFacts
from .verdict_model import Verdict
from .words import device_of, seen_in

_SHARED = ("module", "cls", "root", "phase", "value", "dtype", "attempt", "step", "batch")


def overflow_at(first: LocalDiagnosis, **rest: Any) -> Verdict:
    """Where it was and what, as the diagnosis says; `rest` are the verdict's other fields, and those that differ."""
    place = {name: getattr(first, name) for name in _SHARED} | {"role": first.own_role, "seen_in": seen_in(first)}
    return Verdict(kind="overflow", **(place | rest))


def whose(facts: RunFacts, first: LocalDiagnosis) -> dict[str, Any]:
    """rank, host and device, for a verdict that names the diagnosis's rank."""
    rank = facts.ranks[first.attempt, first.rank]
    return {"rank": first.rank, "host": facts.host(rank) or None, "device": device_of(rank)}
