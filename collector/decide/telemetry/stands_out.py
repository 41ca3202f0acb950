"""What stands out in the figures of a node around an event. Pure: it takes series, and returns sentences.

What is told is far from how a healthy node does. It is no cause: a node may swap for hours and train on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy

from ....core.telemetry.metrics import HOST
from .amounts import share_text, size_text, time_text, when_text
from .model import Notable
from .node_series import NodeSeries, Series

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
    "clocks_hw_thermal": "the hardware held its clocks down because it was hot",
    "clocks_sw_thermal": "the driver held its clocks down because it was hot",
    "clocks_hw_power_brake": "the power supply held its clocks down",
    "clocks_hw_slowdown": "the hardware held its clocks down",
}
"""Its power limit holds down the clocks of every GPU at full load."""


class Found(NamedTuple):
    """What a rule has found. `text` is the sentence without the host and the time."""

    of: str
    what: str
    value: float
    unit: str
    at_s: float
    text: str
    lasted: bool = False
    """It is told of all the time around the event, not of a moment."""


def stands_out(node: NodeSeries, event: str) -> list[Notable]:
    """Of one node around the event, which `event` calls `the overflow`; the worst first."""
    around = node.within(-BEFORE_S, AFTER_S)
    return [_notable(node.host, found, event) for rule in _RULES for found in rule(around)]


def _notable(host: str, found: Found, event: str) -> Notable:
    when = f" around {event}" if found.lasted else f", {when_text(found.at_s, event)}"
    value = float(f"{found.value:.4g}")
    return Notable(host, found.of, found.what, value, found.unit, round(found.at_s, 1), f"{host}: {found.text}{when}")


def _uncorrected(node: NodeSeries) -> Iterator[Found]:
    yield from _grown(node, "ecc_uncorrected", lambda of, n: f"{n} new uncorrectable ECC error{_s(n)} on {of}")


def _clocks(node: NodeSeries) -> Iterator[Found]:
    for of in node.of("clocks_hw_slowdown"):
        for what, text in _HELD.items():
            held = node.get(of, what)
            if held is None or not held.share >= CLOCKS_HELD:
                continue
            over_s = float(numpy.nansum(held.over_s))
            sentence = (
                f"{of}: {text}{_beside(node, of)}, for {time_text(held.share * over_s)} of the {time_text(over_s)}"
            )
            yield Found(of, what, held.share, "share", _last(held), sentence, lasted=True)
            break


def _beside(node: NodeSeries, of: str) -> str:
    hot, clock, highest = (node.get(of, what) for what in ("temperature", "sm_clock", "sm_clock_max"))
    parts = [f"up to {hot.values.max():.0f} C"] if hot is not None else []
    if clock is not None:
        most = f" of {highest.values.max():.0f}" if highest is not None else ""
        parts.append(f"SM clock down to {clock.values.min():.0f}{most} MHz")
    return f" ({', '.join(parts)})" if parts else ""


def _steal(node: NodeSeries) -> Iterator[Found]:
    peak = _peak(node.get(HOST, "steal"))
    if peak is not None and peak[0] >= STEAL:
        text = f"other virtual machines took {share_text(peak[0])} of its processors (steal)"
        yield Found(HOST, "steal", peak[0], "share", peak[1], text)


def _swapping(node: NodeSeries) -> Iterator[Found]:
    for what, text in (("swap_in", "read {} a second from swap"), ("swap_out", "wrote {} a second to swap")):
        peak, used = _peak(node.get(HOST, what)), _peak(node.get(HOST, "swap_used"))
        if peak is not None and peak[0] >= SWAPPING:
            in_use = f", {size_text(used[0])} of it in use" if used is not None else ""
            yield Found(HOST, what, peak[0], "bytes/s", peak[1], f"it {text.format(size_text(peak[0]))}{in_use}")
            return


def _memory(node: NodeSeries) -> Iterator[Found]:
    for used, limit, text in (
        ("job_memory_used", "job_memory_limit", "the job used {} of the {} of memory that it may"),
        ("memory_used", "memory_total", "{} of {} of memory were in use"),
    ):
        peak, most = _peak(node.get(HOST, used)), _peak(node.get(HOST, limit))
        if peak is not None and most is not None and peak[0] >= MEMORY_FULL * most[0] > 0:
            yield Found(HOST, used, peak[0], "bytes", peak[1], text.format(size_text(peak[0]), size_text(most[0])))
            return


def _infiniband(node: NodeSeries) -> Iterator[Found]:
    yield from _grown(node, "ib_errors", lambda of, n: f"{n} new error{_s(n)} of its InfiniBand port {of}")


def _network(node: NodeSeries) -> Iterator[Found]:
    yield from _grown(node, "net_errors", lambda of, n: f"{n} new error{_s(n)} of its network interfaces")


def _corrected(node: NodeSeries) -> Iterator[Found]:
    yield from _grown(node, "ecc_corrected", lambda of, n: f"{n} new corrected ECC error{_s(n)} on {of}")


def _held_back(node: NodeSeries) -> Iterator[Found]:
    held = node.get(HOST, "job_cpu_held")
    if held is not None and held.share >= CPU_HELD:
        text = f"the job's own processor limit held it back in {share_text(held.share)} of the time"
        yield Found(HOST, "job_cpu_held", held.share, "share", _last(held), text, lasted=True)


def _disk(node: NodeSeries) -> Iterator[Found]:
    for of in node.of("disk_free"):
        free, size = node.get(of, "disk_free"), node.get(of, "disk_size")
        if free is None or size is None:
            continue
        least = int(free.values.argmin())
        left = float(free.values[least])
        if left < DISK_FREE * float(size.values.max()):
            yield Found(
                of, "disk_free", left, "bytes", float(free.at_s[least]), f"{size_text(left)} were left in its {of}"
            )


def _open_files(node: NodeSeries) -> Iterator[Found]:
    for of in node.of("open_files"):
        peak, most = _peak(node.get(of, "open_files")), _peak(node.get(of, "open_files_limit"))
        if peak is not None and most is not None and peak[0] >= OPEN_FILES * most[0] > 0:
            text = f"{of} had {peak[0]:.0f} of {most[0]:.0f} files open that it may"
            yield Found(of, "open_files", peak[0], "", peak[1], text)


_RULES: tuple[Callable[[NodeSeries], Iterator[Found]], ...] = (
    _uncorrected,
    _clocks,
    _memory,
    _swapping,
    _steal,
    _infiniband,
    _held_back,
    _network,
    _disk,
    _open_files,
    _corrected,
)


def _grown(node: NodeSeries, what: str, text: Callable[[str, int], str]) -> Iterator[Found]:
    for of in node.of(what):
        series = node.get(of, what)
        assert series is not None
        number = round(float(numpy.nansum(series.values)))
        if number > 0:
            yield Found(of, what, number, "", _last(series), text(of, number))


def _last(series: Series) -> float:
    """When a count that has grown did so last."""
    return float(series.at_s[numpy.flatnonzero(numpy.nan_to_num(series.values))[-1]])


def _peak(series: Series | None) -> tuple[float, float] | None:
    """(the largest, when it was so closest to the event); None if there is none."""
    if series is None:
        return None
    shown: Any = series.shown
    if not numpy.isfinite(shown).any():
        return None
    largest = float(numpy.nanmax(shown))
    at_s = series.at_s[shown >= _AS_LARGE * largest]
    return largest, float(at_s[numpy.abs(at_s).argmin()])


def _s(number: int) -> str:
    return "s" if number != 1 else ""
