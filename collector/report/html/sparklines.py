"""The figures of a node as small curves: geometry for the template to draw as SVG. Units are those of the viewBox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....core.telemetry.metrics import METRICS
from ...decide.telemetry.amounts import share_text, size_text, when_text
from ...decide.telemetry.model import Figure, NodeFigures
from ..model import Report

WIDTH, HEIGHT, EDGE = 220, 44, 3
_MOST_LINES = 16
"""In one curve's picture."""
_SHOWN = (
    "cpu",
    "steal",
    "iowait",
    "memory_used",
    "swap_in",
    "swap_out",
    "net_received",
    "net_sent",
    "ib_received",
    "ib_sent",
    "rss",
    "gpu_use",
    "gpu_memory_used",
    "sm_clock",
    "temperature",
    "power",
)
_OF = {"memory_used": "memory_total", "gpu_memory_used": "gpu_memory_total", "sm_clock": "sm_clock_max"}
"""What is the upper edge of a picture, where it is known."""


class Curve(NamedTuple):
    """One figure of one GPU or rank, or of the host."""

    of: str
    path: str


class Spark(NamedTuple):
    """One figure of all GPUs, of all ranks, or of the host."""

    title: str
    most: str
    """The upper edge, in words."""
    curves: list[Curve]
    event_x: float | None
    description: str


class NodeSparks(NamedTuple):
    """One node."""

    host: str
    sparks: list[Spark]
    troubles: list[str]


def sparklines(report: Report) -> list[NodeSparks]:
    """A row of pictures for each node that the report has figures of."""
    telemetry = report.telemetry
    if telemetry is None:
        return []
    return [NodeSparks(node.host, _of_node(node, telemetry.event), node.troubles) for node in telemetry.nodes]


def _of_node(node: NodeFigures, event: str) -> list[Spark]:
    if len(node.at_s) < 2:
        return []
    by_what: dict[str, list[Figure]] = {}
    for figure in node.figures:
        by_what.setdefault(figure.what, []).append(figure)
    found = []
    for what in _SHOWN:
        figures = by_what.get(what, [])[:_MOST_LINES]
        values = [value for figure in figures for value in figure.values if value is not None]
        if len(values) < 2:
            continue
        limits = [value for figure in by_what.get(_OF.get(what, ""), []) for value in figure.values if value]
        top = max(1.0 if METRICS[what].unit == "share" and what != "steal" else 0.0, *values, *limits)
        found.append(_spark(node.at_s, figures, top, max(values), event))
    return found


def _spark(at_s: Sequence[float], figures: list[Figure], top: float, highest: float, event: str) -> Spark:
    first, last = at_s[0], at_s[-1]
    wide = (WIDTH - 2 * EDGE) / (last - first or 1.0)
    high = (HEIGHT - 2 * EDGE) / (top or 1.0)
    xs = [f"{EDGE + wide * (at - first):.0f}" for at in at_s]
    curves = [Curve(figure.of or "the host", _path(xs, figure.values, high)) for figure in figures]
    span = f"from {when_text(first, event)} to {when_text(last, event)}" if event else "over the run"
    one = figures[0]
    return Spark(
        one.text,
        amount_text(highest, one.unit),
        curves,
        _event_x(at_s, wide) if event else None,
        f"{one.text}, {len(figures)} curve{'s' if len(figures) > 1 else ''}, {span}, "
        f"at most {amount_text(highest, one.unit)}",
    )


def _event_x(at_s: Sequence[float], wide: float) -> float | None:
    """None where it was further away than two samples are from each other."""
    first, last = at_s[0], at_s[-1]
    near = (last - first) / (len(at_s) - 1)
    if not first - near <= 0 <= last + near:
        return None
    return round(EDGE + wide * (min(max(0.0, first), last) - first), 1)


def _path(xs: list[str], values: Sequence[float | None], high: float) -> str:
    """Lines between neighbours that are known."""
    parts, down = [], False
    for x, value in zip(xs, values, strict=True):
        if value is not None:
            parts.append(f"{'L' if down else 'M'}{x} {HEIGHT - EDGE - high * max(0.0, value):.1f}")
        down = value is not None
    return "".join(parts)


def amount_text(value: float, unit: str) -> str:
    """`93%`, `12 MiB/s`, `1980 MHz`"""
    if unit == "share":
        return share_text(value)
    if unit.startswith("bytes"):
        return size_text(value) + unit.removeprefix("bytes")
    return f"{value:.4g} {unit}".strip()
