"""What happened over time, for the template to draw: the nodes' figures as curves, the ranks' events as lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....core.identity import rank_name
from ....core.text import size_text
from ....core.wire.columns import METRICS
from ..model import RunReport, TimelineEntry
from ..run_figures import FigureSeries, NodeFigures
from ..sentence_parts import counted, grouped, share_text, when_text
from .chart import svg_path

# The figures of a node as small curves. Units are those of the viewBox.

SPARK_WIDTH, SPARK_HEIGHT, EDGE = 220, 44, 3
_MOST_CURVES = 16
"""Most curves in one picture."""
_SHOWN = (
    *("cpu", "steal", "iowait", "memory_used", "swap_in", "swap_out", "net_received", "net_sent"),
    *("ib_received", "ib_sent", "rss", "gpu_use", "gpu_memory_used", "sm_clock", "temperature", "power"),
)
_OF = {"memory_used": "memory_total", "gpu_memory_used": "gpu_memory_total", "sm_clock": "sm_clock_max"}
"""figure -> the figure that gives the upper edge of its picture, if known"""


class FigureCurves(NamedTuple):
    """One figure of all GPUs, of all ranks, or of the host."""

    title: str
    most: str
    """The upper edge, in words."""
    curves: list[tuple[str, str]]
    """(of which GPU or rank, SVG path)"""
    event_x: float | None
    description: str


def sparklines(node: NodeFigures, event: str) -> list[FigureCurves]:
    """A row of pictures for a node."""
    if len(node.at_s) < 2:
        return []
    by_what = grouped(node.figures, lambda figure: figure.what)
    found = []
    for what in _SHOWN:
        figures = by_what.get(what, [])[:_MOST_CURVES]
        values = [value for figure in figures for value in figure.values if value is not None]
        if len(values) < 2:
            continue
        limits = [value for figure in by_what.get(_OF.get(what, ""), []) for value in figure.values if value]
        top = max(1.0 if METRICS[what].unit == "share" and what != "steal" else 0.0, *values, *limits)
        found.append(_curves(node.at_s, figures, top, max(values), event))
    return found


def _curves(at_s: Sequence[float], figures: list[FigureSeries], top: float, highest: float, event: str) -> FigureCurves:
    first, last = at_s[0], at_s[-1]
    wide = (SPARK_WIDTH - 2 * EDGE) / (last - first or 1.0)
    high = (SPARK_HEIGHT - 2 * EDGE) / (top or 1.0)
    xs = [round(EDGE + wide * (at - first)) for at in at_s]
    span = f"from {when_text(first, event)} to {when_text(last, event)}" if event else "over the run"
    title, most = figures[0].text, amount_text(highest, figures[0].unit)
    curves = [(figure.of or "the host", _curve(xs, figure.values, high)) for figure in figures]
    description = f"{title}, {counted(len(figures), 'curve')}, {span}, at most {most}"
    return FigureCurves(title, most, curves, _event_x(at_s, wide) if event else None, description)


def _event_x(at_s: Sequence[float], wide: float) -> float | None:
    """None where it was further away than two samples are from each other."""
    first, last = at_s[0], at_s[-1]
    near = (last - first) / (len(at_s) - 1)
    is_near = first - near <= 0 <= last + near
    return round(EDGE + wide * (min(max(0.0, first), last) - first), 1) if is_near else None


def _curve(xs: list[int], values: Sequence[float | None], high: float) -> str:
    """Lines between neighbours that are known."""
    known = zip(xs, values, strict=True)
    bottom = SPARK_HEIGHT - EDGE
    return svg_path((x, round(bottom - high * max(0.0, y), 1)) if y is not None else None for x, y in known)


def amount_text(value: float, unit: str) -> str:
    """`93%`, `12 MiB/s`, `1980 MHz`"""
    if unit == "share":
        return share_text(value)
    if unit.startswith("bytes"):
        return size_text(value) + unit.removeprefix("bytes")
    return f"{value:.4g} {unit}".strip()


# The timeline as lanes, one for each rank: who met something first, and who ended because of it.
#
# Time runs in the order that the collectives give. It has no scale: clocks of different hosts are not compared.

_MOST_LANES = 24
_LEFT, _WIDTH, _TOP, _HEIGHT = 112, 900, 18, 22
SHAPES = {"fault": "circle", "anomaly": "cross", "raised": "triangle", "ended": "square"}
"""Kind of an event -> its shape; other events are in the table alone. Between two collectives they come in this order:
a rank first meets something, then raises; its end comes after all of its events."""


class RankLane(NamedTuple):
    """One rank."""

    rank: int
    name: str
    y: int
    end: float
    named: bool
    events: list[tuple[float, str, str]]
    """(x, shape, title)"""


class TimelineLanes(NamedTuple):
    """What the template draws."""

    lanes: list[RankLane]
    left: int
    width: int
    height: int
    ticks: list[tuple[float, str]]
    """(x, collectives issued)"""
    left_out: int


def lanes(report: RunReport) -> TimelineLanes | None:
    """None where nothing happened that has a shape."""
    attempt = report.verdict.attempt if report.verdict.attempt is not None else report.run.attempts - 1
    events = [e for e in report.timeline if e.attempt == attempt and e.rank is not None and e.kind in SHAPES]
    met = [event.rank for event in events if event.kind != "ended"]
    if not met:
        return None
    everyone = dict.fromkeys(rank for rank in [report.named, *met, *(e.rank for e in events)] if rank is not None)
    ranks = list(everyone)[:_MOST_LANES]
    last = {rank: max(map(_seq, group)) for rank, group in grouped(events, lambda event: event.rank).items()}
    shapes = list(SHAPES)
    seen_at = ((event, last[event.rank] if event.kind == "ended" else _seq(event)) for event in events)
    kept = [(event, (seq, shapes.index(event.kind))) for event, seq in seen_at if event.rank in ranks]
    moments = sorted({moment for _, moment in kept})
    wide = (_WIDTH - _LEFT - 30) / max(1, len(moments))
    place = {moment: round(_LEFT + wide * (n + 0.5), 1) for n, moment in enumerate(moments)}
    found = []
    for n, rank in enumerate(ranks):
        name = rank_name(rank)
        own = ((event, place[moment]) for event, moment in kept if event.rank == rank)
        mine = [(x, SHAPES[e.kind], f"{name}, after {e.seq} collectives: {e.what}") for e, x in own]
        end = max((x for x, _, _ in mine), default=float(_LEFT))
        found.append(RankLane(rank, name, _TOP + n * _HEIGHT, end, rank == report.named, mine))
    first = {moment[0]: moment for moment in reversed(moments)}
    collectives = sorted(first)
    ticked = collectives[:: max(1, len(collectives) // 10)]
    ticks = [(place[first[seq]], str(seq) if seq >= 0 else "none") for seq in ticked]
    others = len({event.rank for event in events}) - len(ranks)
    return TimelineLanes(found, _LEFT, _WIDTH, _TOP + len(found) * _HEIGHT + 26, ticks, others)


def _seq(event: TimelineEntry) -> int:
    return event.seq if event.seq is not None else -1
