"""The memory of a node and of a rank in the minute before that rank, or its node, was lost.

vm in the 58 s before the end of rank 1
                                  58 s before  30 s before     last
resident memory of rank 1            2.1 GiB      30.4 GiB  55.2 GiB
memory in use                        8.1 GiB      36.9 GiB  60.3 GiB  of 62.7 GiB
processor in use                         41%          40%       12%
"""

from __future__ import annotations

from typing import NamedTuple

from ...core.codes import VerdictKind
from ...core.text import size_text
from .model import RunReport
from .run_figures import FigureSeries, NodeFigures
from .sentence_parts import share_text

SPAN_S = 60.0
_SHOWN = {
    "rss": "",
    "job_memory_used": "job_memory_limit",
    "memory_used": "memory_total",
    "swap_used": "",
    "gpu_memory_used": "gpu_memory_total",
    "cpu": "",
}
"""A figure, and the one that is its limit."""
_MOST_ROWS = 6


class MinuteRow(NamedTuple):
    """A figure in words, at each of the times."""

    title: str
    values: list[str]
    limit: str
    """`of 62.7 GiB`; "" if it has none."""


class LastMinute(NamedTuple):
    """Figures of the node on which a rank was lost."""

    title: str
    times: list[str]
    """`58 s before`, `last`"""
    rows: list[MinuteRow]


def last_minute(report: RunReport) -> LastMinute | None:
    """None for another verdict than `lost`, and if nobody has read the node's figures in that time."""
    verdict, telemetry = report.verdict, report.telemetry
    if verdict.kind is not VerdictKind.LOST or telemetry is None or not telemetry.event:
        return None
    node = next((node for node in telemetry.nodes if node.host == verdict.host), None)
    if node is None:
        return None
    places = _places(node)
    if not places:
        return None
    wanted = {"", f"rank {verdict.rank}", verdict.gpu}
    found = [each for what in _SHOWN for each in node.figures if each.what == what and each.of in wanted]
    rows = [_row(each, node, places) for each in found][:_MOST_ROWS]
    if not rows:
        return None
    times = [*(f"{-node.at_s[place]:.0f} s before" for place in places[:-1]), "last"]
    span = f"the {-node.at_s[places[0]]:.0f} s before" if len(places) > 1 else "the last moment before"
    return LastMinute(f"{node.host} in {span} {telemetry.event}", times, rows)


def _places(node: NodeFigures) -> list[int]:
    """Indices of up to three times: the first of the minute, one half way, and the last before the event."""
    before = [place for place, at_s in enumerate(node.at_s) if -SPAN_S <= at_s <= 0.0]
    if not before:
        return []
    return sorted({before[0], before[len(before) // 2], before[-1]})


def _row(figure: FigureSeries, node: NodeFigures, places: list[int]) -> MinuteRow:
    values = [_text(figure.values[place], figure.unit) if place < len(figure.values) else "-" for place in places]
    limits = (each for each in node.figures if each.what == _SHOWN[figure.what] and each.of == figure.of)
    limit = next((number for each in limits for number in reversed(each.values) if number is not None), None)
    of = figure.of if figure.of.startswith("rank ") else "its GPU"
    title = f"{figure.text} of {of}" if figure.of else figure.text
    return MinuteRow(title, values, f"of {_text(limit, figure.unit)}" if limit is not None else "")


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return size_text(value) if unit == "bytes" else share_text(value)
