"""Geometry of a line chart with a logarithmic axis, for the template to draw as SVG. Units are those of the viewBox."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ....core.frames import format_number
from ....core.metrics import METRICS
from ..model import FigureSeries, NodeFigures, RunReport
from ..sentence_parts import share_text, size_text, when_text

WIDTH, HEIGHT = 640, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 40
_MOST_TICKS = 7
_MORE_FOR_GROWTH = 0.25
"""So much of the axis may be added for a forecast that goes beyond the last batch."""


class ChartSeries(NamedTuple):
    """One line. Points are (x, y); y is None where nothing was measured, inf where the value was not finite."""

    name: str
    style: str
    """A class of the style sheet: `named`, `other`, `band`"""
    points: Sequence[tuple[float, float | None]]
    rank: int = -1


class DtypeLimit(NamedTuple):
    """The largest finite number of a dtype."""

    dtype: str
    value: float


class NonFiniteMark(NamedTuple):
    """A point that is not finite: drawn at the upper edge."""

    x: float
    y: float
    style: str
    title: str


class GrowthLine(NamedTuple):
    """A forecast: from one value the series reaches another one, as a straight line on the logarithmic axis."""

    x: float
    y: float
    end: float
    """The upper value,"""
    at: float
    """which is reached here,"""
    earliest: float
    latest: float
    """or between these."""
    label: str
    text: str
    """For the legend."""


class DrawnGrowth(NamedTuple):
    """A forecast as SVG paths."""

    line: str
    band: str
    start: tuple[float, float]
    label: str
    text: str


class SeriesPaths(NamedTuple):
    """One line as SVG paths."""

    name: str
    style: str
    path: str
    rank: int
    last: tuple[float, float] | None
    """Its last point, for a label."""


class AxisTick(NamedTuple):
    """A label of an axis."""

    at: float
    text: str


class OutputChart(NamedTuple):
    """What the template draws."""

    title: str
    description: str
    x_title: str
    lines: list[SeriesPaths]
    marks: list[NonFiniteMark]
    limit_y: float | None
    limit_text: str
    x_ticks: list[AxisTick]
    y_ticks: list[AxisTick]
    guide: AxisTick | None
    """A vertical line at the place that the verdict is about."""
    growth: DrawnGrowth | None = None
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM


def draw(
    title: str,
    description: str,
    x_title: str,
    series: Sequence[ChartSeries],
    x_ticks: Sequence[tuple[float, str]],
    limit: DtypeLimit | None,
    guide: tuple[float, str] | None = None,
    growth: GrowthLine | None = None,
) -> OutputChart | None:
    """The chart; None where no value is above zero and finite."""
    finite = [y for each in series for _, y in each.points if y is not None and 0 < y < math.inf]
    xs = [x for each in series for x, _ in each.points]
    if not finite:
        return None
    shown_limit = limit if limit is not None and max(finite) > limit.value / 2**40 else None
    low, high = math.log10(min(finite)), math.log10(max([*finite, *([shown_limit.value] if shown_limit else [])]))
    low, high = (low - 0.15, high + 0.15) if high - low > 0.2 else (low - 0.5, high + 0.5)
    first, last = min(xs), max(xs)
    if growth is not None:
        last = max(last, min(growth.at, last + (last - first) * _MORE_FOR_GROWTH))
    wide = last - first or 1

    def place_x(x: float) -> float:
        return round(LEFT + (x - first) / wide * (WIDTH - LEFT - RIGHT), 1)

    def place_y(y: float) -> float:
        clipped = min(max(math.log10(y), low), high) if y > 0 else low
        return round(HEIGHT - BOTTOM - (clipped - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    lines, marks = [], []
    for each in series:
        points = [(place_x(x), place_y(y)) if y is not None and y < math.inf else None for x, y in each.points]
        lines.append(
            SeriesPaths(each.name, each.style, _path(points), each.rank, next(filter(None, reversed(points)), None))
        )
        marks += [
            NonFiniteMark(place_x(x), TOP - 6, each.style, f"{each.name}: not finite")
            for x, y in each.points
            if y is not None and not y < math.inf
        ]
    return OutputChart(
        title,
        description,
        x_title,
        lines,
        marks,
        place_y(shown_limit.value) if shown_limit else None,
        f"{shown_limit.dtype} ends at {format_number(shown_limit.value).strip()}" if shown_limit else "",
        [AxisTick(place_x(x), text) for x, text in x_ticks],
        [AxisTick(place_y(10.0**power), f"1e{power:+03d}") for power in powers(low, high)],
        AxisTick(place_x(guide[0]), guide[1]) if guide is not None else None,
        _draw_growth(growth, last, place_x, place_y) if growth is not None else None,
    )


def _draw_growth(
    growth: GrowthLine, last: float, place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> DrawnGrowth:

    def towards(at: float) -> tuple[float, float]:
        share = min(1.0, (last - growth.x) / max(at - growth.x, 1e-9))
        y = math.exp(math.log(growth.y) + share * (math.log(growth.end) - math.log(growth.y)))
        return place_x(min(at, last)), place_y(y)

    start = place_x(growth.x), place_y(growth.y)
    edge = [start, towards(growth.earliest), (place_x(min(growth.latest, last)), towards(growth.earliest)[1])]
    if growth.latest > last and growth.earliest > last:
        edge.pop()
    return DrawnGrowth(
        _path([start, towards(growth.at)]),
        _path([*edge, towards(growth.latest)]) + "Z",
        start,
        growth.label,
        growth.text,
    )


def _path(points: Iterable[tuple[float, float] | None]) -> str:
    """`M0 1L2 3`; a gap begins a new stretch. A lone point is a dot: a round cap shows it."""
    parts: list[str] = []
    drawing = False
    for point in points:
        if point is None:
            drawing = False
            continue
        parts.append(f"{'L' if drawing else 'M'}{point[0]:g} {point[1]:g}" + ("" if drawing else "h0"))
        drawing = True
    return "".join(parts)


def powers(low: float, high: float) -> list[int]:
    """Powers of ten between two logarithms, at most `_MOST_TICKS` of them.

    >>> powers(-0.2, 4.9)
    [0, 1, 2, 3, 4]
    """
    first, last = math.ceil(low), math.floor(high)
    every = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
    return list(range(first, last + 1, every))


def even_ticks(first: int, last: int, most: int = 8) -> list[tuple[float, str]]:
    """Whole numbers at round distances, for an axis of batches.

    >>> even_ticks(0, 68, 4)
    [(0, '0'), (20, '20'), (40, '40'), (60, '60')]
    """
    span = max(1, last - first)
    step = next(
        step for power in range(12) for step in (10**power, 2 * 10**power, 5 * 10**power) if span / step <= most
    )
    return [(batch, str(batch)) for batch in range(-(-first // step) * step, last + 1, step)]


# The figures of a node as small curves: geometry for the template to draw as SVG. Units are those of the viewBox.

SPARK_WIDTH, SPARK_HEIGHT, EDGE = 220, 44, 3
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


class FigureCurve(NamedTuple):
    """One figure of one GPU or rank, or of the host."""

    of: str
    path: str


class FigureCurves(NamedTuple):
    """One figure of all GPUs, of all ranks, or of the host."""

    title: str
    most: str
    """The upper edge, in words."""
    curves: list[FigureCurve]
    event_x: float | None
    description: str


class NodeSparks(NamedTuple):
    """One node."""

    host: str
    sparks: list[FigureCurves]
    troubles: list[str]


def sparklines(report: RunReport) -> list[NodeSparks]:
    """A row of pictures for each node that the report has figures of."""
    telemetry = report.telemetry
    if telemetry is None:
        return []
    return [NodeSparks(node.host, _of_node(node, telemetry.event), node.troubles) for node in telemetry.nodes]


def _of_node(node: NodeFigures, event: str) -> list[FigureCurves]:
    if len(node.at_s) < 2:
        return []
    by_what: dict[str, list[FigureSeries]] = {}
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


def _spark(at_s: Sequence[float], figures: list[FigureSeries], top: float, highest: float, event: str) -> FigureCurves:
    first, last = at_s[0], at_s[-1]
    wide = (SPARK_WIDTH - 2 * EDGE) / (last - first or 1.0)
    high = (SPARK_HEIGHT - 2 * EDGE) / (top or 1.0)
    xs = [f"{EDGE + wide * (at - first):.0f}" for at in at_s]
    curves = [FigureCurve(figure.of or "the host", _spark_path(xs, figure.values, high)) for figure in figures]
    span = f"from {when_text(first, event)} to {when_text(last, event)}" if event else "over the run"
    one = figures[0]
    return FigureCurves(
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


def _spark_path(xs: list[str], values: Sequence[float | None], high: float) -> str:
    """Lines between neighbours that are known."""
    parts, down = [], False
    for x, value in zip(xs, values, strict=True):
        if value is not None:
            parts.append(f"{'L' if down else 'M'}{x} {SPARK_HEIGHT - EDGE - high * max(0.0, value):.1f}")
        down = value is not None
    return "".join(parts)


def amount_text(value: float, unit: str) -> str:
    """`93%`, `12 MiB/s`, `1980 MHz`"""
    if unit == "share":
        return share_text(value)
    if unit.startswith("bytes"):
        return size_text(value) + unit.removeprefix("bytes")
    return f"{value:.4g} {unit}".strip()
