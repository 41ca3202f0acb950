"""The part of an overflow's verdict that stands in its diagnosis."""

from __future__ import annotations

from typing import Any

from ..diagnose.local_diagnosis import LocalDiagnosis
from ..facts import RunFacts
from .verdict_model import Verdict
from .words import device_of

_SHARED = ("module", "cls", "root", "phase", "role", "value", "dtype", "attempt", "step", "batch")


def overflow_at(first: LocalDiagnosis, **rest: Any) -> Verdict:
    """Where it was and what, as the diagnosis says; `rest` are the verdict's other fields, and those that differ."""
    return Verdict(kind="overflow", **({name: getattr(first, name) for name in _SHARED} | rest))


def whose(facts: RunFacts, first: LocalDiagnosis) -> dict[str, Any]:
    """rank, host and device, for a verdict that names the diagnosis's rank."""
    rank = facts.ranks[first.attempt, first.rank]
    return {"rank": first.rank, "host": facts.host(rank) or None, "device": device_of(rank)}
