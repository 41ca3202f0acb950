"""The events of a run, in the order that the run itself gives them."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from ...core.events import Anomaly, NodeSignal
from ...core.frames import module_text
from ..facts.facts import RunFacts
from ..report.model import TimelineEntry


def utc(seconds: float | None, to: str = "seconds") -> str | None:
    """ISO 8601, rounded down to "seconds" or "milliseconds"."""
    if not seconds:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec=to).replace("+00:00", "Z")


def timeline_of(facts: RunFacts) -> list[TimelineEntry]:
    """Events by attempt and number of collectives; at the same number, by each host's own clock."""
    found: list[tuple[tuple[int, int, int], TimelineEntry]] = []
    for rank in facts.everyone.values():
        events: list[tuple[Any, str, str]] = [(a, "anomaly", _anomaly_text(a)) for a in rank.anomalies]
        events += [(e, "raised", f"raised {e.error}") for e in rank.errors]
        events += [(f, "fault", f"gpuwatch's own fault: {f.part}: {f.message}") for f in rank.faults]
        if rank.preflight is not None:
            events.append((rank.preflight, "preflight", f"preflight {rank.preflight.outcome}"))
        if rank.exit is not None:
            events.append((rank.exit, "ended", f"ended with {rank.exit.code} ({rank.exit.by})"))
        for event, kind, text in events:
            where = event.where
            last = 1 if event is rank.exit else 0
            found.append(
                (
                    (where.attempt, where.collectives, last),
                    TimelineEntry(
                        utc(where.time_ns / 1e9),
                        rank.rank,
                        where.attempt,
                        text,
                        where.step,
                        where.batch,
                        where.collectives,
                        kind,
                    ),
                )
            )
    found.sort(key=lambda pair: (pair[0], pair[1].time or "~", pair[1].rank))
    entries = [entry for _, entry in found]
    for node in facts.nodes.values():
        signal_: NodeSignal | None = node.signal
        if signal_ is not None:
            host = node.hello.host if node.hello is not None else ""
            entries.append(
                TimelineEntry(
                    utc(signal_.time_ns / 1e9),
                    None,
                    facts.last_attempt,
                    f"launch on {host} got signal {signal_.signal}",
                    kind="signal",
                )
            )
    return entries


def _anomaly_text(anomaly: Anomaly) -> str:
    return f"{anomaly.value} in {anomaly.role} of {module_text(anomaly.module, anomaly.cls)}"
