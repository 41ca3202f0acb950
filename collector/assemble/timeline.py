"""The events of a run in the order that the run itself gives them, and the forecasts that its node agents made."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any

from ...core.events import LimitForecast
from ...core.frames import format_number, module_text
from ..facts.facts import RankFacts, RunFacts
from ..report.model import ModuleForecast, TimelineEntry
from ..report.sentence_parts import grouped


def utc(seconds: float | None, to: str = "seconds") -> str | None:
    """ISO 8601, rounded down to "seconds" or "milliseconds"."""
    if not seconds:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec=to).replace("+00:00", "Z")


def timeline_of(facts: RunFacts) -> list[TimelineEntry]:
    """Events by attempt and number of collectives; at the same number, by each host's own clock."""
    found: list[tuple[tuple[int, int, bool, str, int], TimelineEntry]] = []
    for rank in facts.everyone.values():
        events: list[tuple[Any, str, str]] = [
            (a, "anomaly", f"{a.value} in {a.role} of {module_text(a.module, a.cls)}") for a in rank.anomalies
        ]
        events += [(e, "raised", f"raised {e.error}") for e in rank.errors]
        events += [(f, "fault", f"gpuwatch's own fault: {f.part}: {f.message}") for f in rank.faults]
        if rank.preflight is not None:
            events.append((rank.preflight, "preflight", f"preflight {rank.preflight.outcome}"))
        if rank.exit is not None:
            events.append((rank.exit, "ended", f"ended with {rank.exit.code} ({rank.exit.by})"))
        for event, kind, text in events:
            at = event.where
            time = utc(at.time_ns / 1e9)
            entry = TimelineEntry(time, rank.rank, at.attempt, text, at.step, at.batch, at.collectives, kind)
            found.append(((at.attempt, at.collectives, event is rank.exit, time or "~", rank.rank), entry))
    entries = [entry for _, entry in sorted(found, key=lambda pair: pair[0])]
    for node in facts.nodes.values():
        if node.signal is not None:
            text = f"launch on {node.host} got signal {node.signal.signal}"
            entries.append(TimelineEntry(utc(node.signal.time_ns / 1e9), None, facts.last_attempt, text, kind="signal"))
    return entries


# Modules that were about to pass their dtype's limit, as the node agents saw it while the ranks ran.

_MOST_MODULES = 64


def forecasts_of(ranks: list[RankFacts]) -> list[ModuleForecast]:
    """By module, the earliest forecast first."""
    sound = (forecast for rank in ranks for forecast in rank.forecasts if is_sound(forecast))
    found = []
    for module, group in grouped(sound, lambda forecast: forecast.module).items():
        first = min(group, key=lambda forecast: (forecast.where.batch, forecast.after, forecast.where.rank))
        names = ("cls", "dtype", "limit", "after", "earliest", "latest", "since")
        fields: dict[str, Any] = {name: getattr(first, name) for name in names}
        fields |= {"rank": first.where.rank, "batch": first.where.batch, "abs_max": float(f"{first.abs_max:.3g}")}
        numbers = sorted({forecast.where.rank for forecast in group})
        found.append(ModuleForecast(module=module, ranks=numbers, **fields))
    return sorted(found, key=lambda each: (each.batch, -_depth(each.module), each.after, each.module))[:_MOST_MODULES]


def _depth(module: str) -> int:
    """A module stands before those around it, which return what it has returned."""
    return module.count(".") + (module != "")


def passing_text(told: ModuleForecast | LimitForecast) -> str:
    """`` `fc2` was at 4.10e+03 and would pass it in about 40 batches (30 to 60) ``"""
    name = f"`{told.module}`" if told.module else "the root"
    size = format_number(told.abs_max).strip()
    return f"{name} was at {size} and would pass it in about {told.after} batches ({told.earliest} to {told.latest})"


def limit_text(limit: float) -> str:
    """`65504`, `3.39e+38`"""
    return f"{limit:.0f}" if limit < 1e6 else format_number(limit).strip()


def is_sound(forecast: LimitForecast) -> bool:
    """Whether its numbers are finite and positive. They were received over the network and cannot be trusted."""
    return all(math.isfinite(number) and number > 0 for number in (forecast.limit, forecast.abs_max))
