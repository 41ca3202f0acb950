"""report.json's `telemetry`: the nodes' figures around the event, and those that stand out. Pure.

A figure that stands out is far from a healthy node's. It need not be the cause: a node may swap for hours and still
train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
from msgspec.structs import replace

from ...core.text import size_text
from ...core.wire.columns import HOST, METRICS
from ..facts.run_facts import RunFacts
from ..report.run_figures import FigureSeries, NodeFigures, TelemetryReport, UnusualFigure
from ..report.sentence_parts import counted, share_text, time_text, when_text
from ..report.verdict import Verdict
from .timeline import FigureSamples, NodeSeries, event_of, series_of_all, utc

MOST_NODES = 4
"""Most nodes whose figures are in the report. Unusual figures are reported for all nodes."""
MOST_ALIKE = 4
"""Up to this many nodes on which the same figure stands out are listed one by one."""
MOST_POINTS = 48
SHOWN_BEFORE_S, SHOWN_AFTER_S = 300.0, 60.0
"""Around the event."""
_EVERYTHING_S = 1e18


def telemetry_report(facts: RunFacts, verdict: Verdict) -> TelemetryReport | None:
    """None if no node has sent any."""
    if not any(node.telemetry for node in facts.nodes.values()):
        return None
    event = event_of(facts, verdict)
    nodes = series_of_all(facts, event.time_ns if event is not None else None)
    named = facts.named(verdict.attempt or 0, verdict.rank)
    agents = sorted(nodes, key=lambda agent: named is None or agent != named.agent)
    found = [each for agent in agents for each in (stands_out(nodes[agent], event.text) if event is not None else [])]
    notable = _alike_counted(found)
    hosts = {each.host for each in notable}
    order = sorted(agents, key=lambda agent: (named is None or agent != named.agent, nodes[agent].host not in hosts))
    shown = [_figures(nodes[agent], with_event=event is not None) for agent in order[:MOST_NODES]]
    what, when = (event.text, utc(event.time_ns / 1e9)) if event is not None else ("", None)
    return TelemetryReport(what, when, notable, shown, len(order) - len(shown))


def _alike_counted(notable: list[UnusualFigure]) -> list[UnusualFigure]:
    hosts: dict[str, dict[str, int]] = {}
    kept = []
    for each in notable:
        on = hosts.setdefault(each.what, {})
        on[each.host] = on.get(each.host, 0) + 1
        if len(on) <= MOST_ALIKE and on[each.host] <= MOST_ALIKE:
            kept.append(each)
    return [replace(each, alike=len(hosts[each.what]) - 1) for each in kept]


def _figures(node: NodeSeries, *, with_event: bool) -> NodeFigures:
    first, last = (-SHOWN_BEFORE_S, SHOWN_AFTER_S) if with_event else (-_EVERYTHING_S, _EVERYTHING_S)
    around = node.within(first, last)
    known = {name: series for name in around.names if (series := around.get(*name)) is not None}
    times = numpy.unique(numpy.concatenate([numpy.zeros(0), *(series.at_s for series in known.values())]))
    ends = [part[-1] for part in numpy.array_split(times, MOST_POINTS) if len(part)]
    figures = []
    for (of, what), series in known.items():
        values = _at(series, ends)
        if any(values):  # of most errors there are none
            metric = METRICS.get(what)
            text, unit = (metric.text, metric.unit) if metric is not None else (what, "")
            figures.append(FigureSeries(of, what, text, unit, values))
    return NodeFigures(node.host, [round(float(end), 1) for end in ends], figures, node.troubles)


def _at(series: FigureSamples, ends: list[Any]) -> list[float | None]:
    """The mean of what was there up to each of these times since the one before; a count's growth in a second."""
    place = numpy.searchsorted(ends, series.at_s)
    known = numpy.isfinite(series.values)
    sums = numpy.bincount(place[known], series.values[known], len(ends))
    over = series.over_s[known] if series.counts else numpy.ones(int(known.sum()))
    weights = numpy.bincount(place[known], over, len(ends))
    return [float(f"{total / weight:.4g}") if weight > 0 else None for total, weight in zip(sums, weights, strict=True)]


# Unusual figures of a node around an event.

BEFORE_S, AFTER_S = 120.0, 30.0
"""Around the event."""
STEAL = 0.10
SWAPPING = 1 << 20
"""Bytes a second, in both directions together."""
MEMORY_FULL = 0.95
DISK_FREE = 0.02
OPEN_FILES = 0.9
CLOCKS_HELD = 0.10
"""Share of the time."""
CPU_HELD = 0.25
_AS_LARGE = 0.99
_HELD = {
    "clocks_hw_thermal": "the hardware throttled its clocks because it was hot",
    "clocks_sw_thermal": "the driver throttled its clocks because it was hot",
    "clocks_hw_power_brake": "the power supply throttled its clocks",
    "clocks_hw_slowdown": "the hardware throttled its clocks",
}
"""Its power limit holds down the clocks of every GPU at full load."""


class NodeFinding(NamedTuple):
    """The finding of a rule. `text` is the sentence without the host and the time."""

    of: str
    what: str
    value: float
    at_s: float
    text: str
    lasted: bool = False
    """It is about all the time around the event, not about a moment."""


def stands_out(node: NodeSeries, event: str) -> list[UnusualFigure]:
    """On one node around the event, which `event` calls `the overflow`; the worst first."""
    around = node.within(-BEFORE_S, AFTER_S)
    notable = []
    for found in (found for rule in _RULES for found in rule(around)):
        when = f" around {event}" if found.lasted else f", {when_text(found.at_s, event)}"
        value, unit, at_s = float(f"{found.value:.4g}"), METRICS[found.what].unit, round(found.at_s, 1)
        text = f"{node.host}: {found.text}{when}"
        notable.append(UnusualFigure(node.host, found.of, found.what, value, unit, at_s, text))
    return notable


def _clocks(node: NodeSeries) -> Iterator[NodeFinding]:
    for of in node.of("clocks_hw_slowdown"):
        for what, text in _HELD.items():
            held = node.get(of, what)
            if held is None or not held.share >= CLOCKS_HELD:
                continue
            over_s = float(numpy.nansum(held.over_s))
            lasted = f"for {time_text(held.share * over_s)} of the {time_text(over_s)}"
            sentence = f"{of}: {text}{_beside(node, of)}, {lasted}"
            yield NodeFinding(of, what, held.share, _last(held), sentence, lasted=True)
            break


def _beside(node: NodeSeries, of: str) -> str:
    hot, clock, highest = (node.get(of, what) for what in ("temperature", "sm_clock", "sm_clock_max"))
    parts = [f"up to {hot.values.max():.0f} C"] if hot is not None else []
    if clock is not None:
        most = f" of {highest.values.max():.0f}" if highest is not None else ""
        parts.append(f"SM clock down to {clock.values.min():.0f}{most} MHz")
    return f" ({', '.join(parts)})" if parts else ""


def _steal(node: NodeSeries) -> Iterator[NodeFinding]:
    peak = _peak(node.get(HOST, "steal"))
    if peak is not None and peak[0] >= STEAL:
        text = f"other virtual machines took {share_text(peak[0])} of its processors (steal)"
        yield NodeFinding(HOST, "steal", peak[0], peak[1], text)


def _swapping(node: NodeSeries) -> Iterator[NodeFinding]:
    for what, text in (("swap_in", "read {} a second from swap"), ("swap_out", "wrote {} a second to swap")):
        peak, used = _peak(node.get(HOST, what)), _peak(node.get(HOST, "swap_used"))
        if peak is not None and peak[0] >= SWAPPING:
            in_use = f", {size_text(used[0])} of it in use" if used is not None else ""
            yield NodeFinding(HOST, what, peak[0], peak[1], f"it {text.format(size_text(peak[0]))}{in_use}")
            return


def _memory(node: NodeSeries) -> Iterator[NodeFinding]:
    job, host = "the job used {} of the {} of memory that it may use", "{} of {} of memory were in use"
    for used, limit, text in (("job_memory_used", "job_memory_limit", job), ("memory_used", "memory_total", host)):
        full = _full(node, HOST, used, limit, MEMORY_FULL)
        if full is not None:
            yield NodeFinding(HOST, used, full[0], full[1], text.format(size_text(full[0]), size_text(full[2])))
            return


def _held_back(node: NodeSeries) -> Iterator[NodeFinding]:
    held = node.get(HOST, "job_cpu_held")
    if held is not None and held.share >= CPU_HELD:
        text = f"the job's own processor limit throttled it in {share_text(held.share)} of the time"
        yield NodeFinding(HOST, "job_cpu_held", held.share, _last(held), text, lasted=True)


def _disk(node: NodeSeries) -> Iterator[NodeFinding]:
    for of in node.of("disk_free"):
        free, size = node.get(of, "disk_free"), node.get(of, "disk_size")
        if free is None or size is None:
            continue
        least = int(free.values.argmin())
        left = float(free.values[least])
        if left < DISK_FREE * float(size.values.max()):
            text = f"{size_text(left)} were left in its {of}"
            yield NodeFinding(of, "disk_free", left, float(free.at_s[least]), text)


def _open_files(node: NodeSeries) -> Iterator[NodeFinding]:
    for of in node.of("open_files"):
        full = _full(node, of, "open_files", "open_files_limit", OPEN_FILES)
        if full is not None:
            text = f"{of} had {full[0]:.0f} of at most {full[2]:.0f} files open"
            yield NodeFinding(of, "open_files", full[0], full[1], text)


def _full(node: NodeSeries, of: str, used: str, limit: str, share: float) -> tuple[float, float, float] | None:
    """(the most that was used, when, the limit), where it was at least this share of the limit."""
    peak, most = _peak(node.get(of, used)), _peak(node.get(of, limit))
    return (*peak, most[0]) if peak is not None and most is not None and peak[0] >= share * most[0] > 0 else None


def _grown(what: str, noun: str, where: str) -> Callable[[NodeSeries], Iterator[NodeFinding]]:
    """A rule for a count that a healthy node does not add to."""

    def rule(node: NodeSeries) -> Iterator[NodeFinding]:
        for of in node.of(what):
            series = node.get(of, what)
            assert series is not None
            number = round(float(numpy.nansum(series.values)))
            if number > 0:
                yield NodeFinding(of, what, number, _last(series), f"{counted(number, noun)} {where.format(of)}")

    return rule


_RULES = (
    _grown("ecc_uncorrected", "new uncorrectable ECC error", "on {}"),
    _clocks,
    _memory,
    _swapping,
    _steal,
    _grown("ib_errors", "new error", "of its InfiniBand port {}"),
    _held_back,
    _grown("net_errors", "new error", "of its network interfaces"),
    _disk,
    _open_files,
    _grown("ecc_corrected", "new corrected ECC error", "on {}"),
)


def _last(series: FigureSamples) -> float:
    return float(series.at_s[numpy.flatnonzero(numpy.nan_to_num(series.values))[-1]])


def _peak(series: FigureSamples | None) -> tuple[float, float] | None:
    """(the largest, when it was so closest to the event); None if there is none."""
    if series is None:
        return None
    shown: Any = series.shown
    if not numpy.isfinite(shown).any():
        return None
    largest = float(numpy.nanmax(shown))
    at_s = series.at_s[shown >= _AS_LARGE * largest]
    return largest, float(at_s[numpy.abs(at_s).argmin()])
