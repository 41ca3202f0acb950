"""report.json's `telemetry`: how the nodes did around the event."""

from __future__ import annotations

import msgspec


class Notable(msgspec.Struct, frozen=True):
    """A figure that stands out."""

    host: str
    of: str
    """A GPU's UUID, `rank 3`, `mlx5_0/1`, `runs-dir`; "" is the host itself."""
    what: str
    """A key of METRICS (core/telemetry/metrics.py)."""
    value: float
    unit: str
    at_s: float
    """When it was so at the worst, in seconds after the event."""
    text: str
    """`gpu-2: 5 new errors of its InfiniBand port mlx5_0/1, 35 s before the overflow`"""
    alike: int = 0
    """On so many other nodes the same figure stands out."""


class Figure(msgspec.Struct, frozen=True):
    """One figure over time."""

    of: str
    """A GPU's UUID, `rank 3`, `mlx5_0/1`, `runs-dir`; "" is the host itself."""
    what: str
    """A key of METRICS (core/telemetry/metrics.py)."""
    text: str
    """What that is, in words."""
    unit: str
    values: list[float | None]
    """At the node's `at_s`; null where it was not read."""


class NodeFigures(msgspec.Struct, frozen=True):
    """How one node did."""

    host: str
    at_s: list[float]
    """Seconds after the event; without one, before the end of the record."""
    figures: list[Figure]
    troubles: list[str] = []
    """What could not be read, and why."""


class TelemetryReport(msgspec.Struct, frozen=True):
    """The figures of the nodes."""

    event: str = ""
    """What the times are measured from: `the overflow`; "" where nothing happened."""
    event_time: str | None = None
    """ISO 8601, by the collector's clock."""
    notable: list[Notable] = []
    """What stands out around the event, the verdict's node first; of many nodes alike, the first few."""
    nodes: list[NodeFigures] = []
    """The verdict's node, those where something stands out, then others."""
    nodes_left_out: int = 0
    """Whose figures are in the store alone."""
    trouble: str = ""
    """Why it could not be told; "" where it could."""
