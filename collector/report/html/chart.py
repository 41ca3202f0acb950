"""The line chart of an overflow for the template to draw as SVG: abs max, a line for each rank.

It shows the batches before the overflow, or the calls of its batch. Units are those of the viewBox.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from ....core.frames import LOSS_MODULE, format_number
from ....core.values import DTYPE_MAX
from ..model import RunReport
from ..run_figures import ModuleForecast, ModuleHistory, RankSeries
from ..side_by_side import rank_to_show, side_by_side
from .value_axis import axis_of

WIDTH, HEIGHT = 640, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 40
_MOST_LINES = 32
_MORE_FOR_GROWTH = 0.25
"""A forecast that goes beyond the last batch may lengthen the axis by this share."""
Point = tuple[float, float]


RankValues = tuple[int, bool, list[tuple[float, float | None]]]
"""(rank, whether the verdict names it, points (x, y)); y: None if nothing was measured, inf if it was not finite"""


class RankLine(NamedTuple):
    """The line of one rank as an SVG path."""

    rank: int
    style: str
    """A class of the style sheet."""
    path: str


class DrawnGrowth(NamedTuple):
    """A forecast as SVG paths: a straight line on the logarithmic axis, and the range around it."""

    line: str
    band: str
    start: Point
    label: str
    text: str
    """For the legend."""


class OutputChart(NamedTuple):
    """The chart as the template draws it."""

    title: str
    description: str
    x_title: str
    lines: list[RankLine]
    marks: list[tuple[float, str, int]]
    """Non-finite points: (x, style, rank)"""
    limit_y: float | None
    limit_text: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    """(place, label)"""
    guide: float | None
    """x of a vertical line at the place that the verdict is about."""
    growth: DrawnGrowth | None = None
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM


def over_the_batches(report: RunReport) -> OutputChart | None:
    """abs max of the outputs of the verdict's module, or of the loss, over the batches, a line for each rank."""
    history, batch = report.history, report.verdict.batch
    if history is None or batch is None:
        return None
    named = next((series for series in history.ranks if series.rank == report.verdict.rank), None)
    if named is None or len(named.batches) < 2 or None not in named.abs_max:  # a gradient was bad, or a weight
        return None
    first, last = _ends(history)
    told = next((each for each in report.forecasts if each.module == history.module), None)
    if told is not None and (told.dtype != history.dtype or not first <= told.batch < min(batch, last)):
        told = None
    what = f"output of {history.module or 'the root module'}" if history.module != LOSS_MODULE else "loss"
    return _draw(
        f"abs max of the {what}, batch by batch",
        f"{_whose_lines(history, named)} In batch {batch} it was no longer finite.",
        "batch",
        _values(history, named),
        even_ticks(first, last),
        (history.dtype, history.limit),
        batch,
        told,
    )


def losses(report: RunReport) -> OutputChart | None:
    """abs max of the loss over the batches, a line for each rank; None where that is the first picture, or unknown."""
    history, batch = report.losses, report.verdict.batch
    if history is None:
        return None
    named = next((series for series in history.ranks if series.rank == report.verdict.rank), history.ranks[0])
    first, last = _ends(history)
    if last - first < 1:
        return None
    return _draw(
        "abs max of the loss, batch by batch",
        _whose_lines(history, named),
        "batch",
        _values(history, named),
        even_ticks(first, last),
        (history.dtype, history.limit),
        batch if batch is not None and first <= batch <= last else None,
    )


def _ends(history: ModuleHistory) -> tuple[int, int]:
    """The first batch and the last one."""
    return min(series.batches[0] for series in history.ranks), max(series.batches[-1] for series in history.ranks)


def _values(history: ModuleHistory, named: RankSeries) -> list[RankValues]:
    found: list[RankValues] = []
    for each in sorted(history.ranks, key=lambda each: each is named):
        values = zip(each.batches, each.abs_max, strict=True)
        points: list[tuple[float, float | None]] = [(at, math.inf if y is None else y) for at, y in values]
        points += [(at, None) for at in each.gaps]
        found.append((each.rank, each is named, sorted(points, key=itemgetter(0))))
    return found


def _whose_lines(history: ModuleHistory, named: RankSeries) -> str:
    others = f"; {history.left_out} more ranks are in the store" if history.left_out else ""
    return f"A line for each of {len(history.ranks)} ranks; rank {named.rank} is the thick one{others}."


def along_the_calls(report: RunReport) -> OutputChart | None:
    """abs max from call to call at the failing batch, a line for each rank."""
    shown = rank_to_show(report)
    found = side_by_side(report, shown, _MOST_LINES, len(shown.frames)) if shown is not None else None
    if shown is None or found is None:
        return None
    ranks: list[RankValues] = []
    for n, rank in enumerate(found.columns):
        cells = enumerate(row.cells[n] for row in found.rows)
        ranks.append((rank.rank, rank is shown, [(at, math.inf if c.bad else c.value or None) for at, c in cells]))
    dtype = report.verdict.dtype or ""
    return _draw(
        f"abs max of the {found.what}, call by call, in batch {found.batch}",
        f"A line for each of {len(ranks)} ranks. Rank {shown.rank} is the thick one; it ends at "
        f"{report.verdict.module or 'the root'}.",
        "calls in order",
        ranks[::-1],
        [(n, "") for n in range(len(found.rows))],
        (dtype, DTYPE_MAX.get(dtype)),
        len(found.rows) - 1,
    )


def _draw(
    title: str,
    description: str,
    x_title: str,
    ranks: list[RankValues],
    x_ticks: Sequence[tuple[float, str]],
    limit: tuple[str, float | None],
    guide: float | None,
    forecast: ModuleForecast | None = None,
) -> OutputChart | None:
    """The chart; None if no value is above zero and finite. `limit`: a dtype and its largest finite number.

    What is not finite is marked above the axis, which holds the other values.
    """
    finite = [y for _, _, points in ranks for _, y in points if y is not None and 0 <= y < math.inf]
    xs = [x for _, _, points in ranks for x, _ in points]
    dtype, largest = limit
    if largest is not None and max(finite, default=0.0) <= largest / 2**40:
        largest = None
    axis = axis_of(finite, largest, logarithmic=forecast is not None)
    if axis is None:
        return None
    first, last = min(xs), max(xs)
    if forecast is not None:
        last = max(last, min(forecast.batch + forecast.after, last + (last - first) * _MORE_FOR_GROWTH))
    wide = last - first or 1

    def place(x: float, y: float) -> Point:
        across = (x - first) / wide * (WIDTH - LEFT - RIGHT)
        up = axis.share(y) * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

    lines: list[RankLine] = []
    marks: list[tuple[float, str, int]] = []
    for rank, named, points in ranks:
        style = "named" if named else "other"
        drawn = (place(x, y) if y is not None and y < math.inf else None for x, y in points)
        lines.append(RankLine(rank, style, svg_path(drawn)))
        marks += [(place(x, 1)[0], style, rank) for x, y in points if y is not None and not y < math.inf]
    return OutputChart(
        title,
        description,
        x_title,
        lines,
        marks,
        place(first, largest)[1] if largest is not None else None,
        f"{dtype} holds at most {format_number(largest).strip()}" if largest is not None else "",
        [(place(x, 1)[0], text) for x, text in x_ticks],
        [(place(first, value)[1], text) for value, text in axis.ticks()],
        place(guide, 1)[0] if guide is not None else None,
        _growth(forecast, int(guide), last, place) if forecast is not None and guide is not None else None,
    )


def _growth(told: ModuleForecast, batch: int, last: float, place: Callable[[float, float], Point]) -> DrawnGrowth:
    ahead = batch - told.batch
    where = "before" if ahead < told.earliest else "after" if ahead > told.latest else "in"
    middle, earliest, latest = (told.batch + batches for batches in (told.after, told.earliest, told.latest))

    def towards(at: float) -> Point:
        share = min(1.0, (last - told.batch) / max(at - told.batch, 1e-9))
        y = math.exp(math.log(told.abs_max) + share * (math.log(told.limit) - math.log(told.abs_max)))
        return place(min(at, last), y)

    start = place(told.batch, told.abs_max)
    edge = [start, towards(earliest)]
    if latest <= last or earliest <= last:
        edge.append((place(min(latest, last), 1)[0], edge[1][1]))
    return DrawnGrowth(
        svg_path([start, towards(middle)]),
        svg_path([*edge, towards(latest)]) + "Z",
        start,
        f"forecast in batch {told.batch}",
        f"forecast made in batch {told.batch} of rank {told.rank}: the output passes the limit in batch {middle} "
        f"({earliest} to {latest}); it did in batch {batch}, {where} that range",
    )


def svg_path(points: Iterable[Point | None]) -> str:
    """`M0 1L2 3`; a gap begins a new stretch. A lone point is a dot: a round cap shows it."""
    parts: list[str] = []
    drawing = False
    for point in points:
        if point is not None:
            parts.append(f"{'L' if drawing else 'M'}{point[0]:g} {point[1]:g}" + ("" if drawing else "h0"))
        drawing = point is not None
    return "".join(parts)


def even_ticks(first: int, last: int, most: int = 8) -> list[tuple[float, str]]:
    """Whole numbers at round distances, for an axis of batches.

    >>> even_ticks(0, 68, 4)
    [(0, '0'), (20, '20'), (40, '40'), (60, '60')]
    """
    steps = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    step = next(step for step in steps if max(1, last - first) / step <= most)
    return [(batch, str(batch)) for batch in range(-(-first // step) * step, last + 1, step)]
