"""What stands out in the figures of a node around an event. Pure: it takes series, and returns sentences.

What is told is far from how a healthy node does. It is no cause: a node may swap for hours and train on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

import numpy

from ...core.metrics import HOST
from ..report.model import UnusualFigure
from ..report.sentence_parts import share_text, size_text, time_text, when_text
from .node_series import FigureSamples, NodeSeries

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


class NodeFinding(NamedTuple):
    """What a rule has found. `text` is the sentence without the host and the time."""

    of: str
    what: str
    value: float
    unit: str
    at_s: float
    text: str
    lasted: bool = False
    """It is told of all the time around the event, not of a moment."""


def stands_out(node: NodeSeries, event: str) -> list[UnusualFigure]:
    """Of one node around the event, which `event` calls `the overflow`; the worst first."""
    around = node.within(-BEFORE_S, AFTER_S)
    return [_notable(node.host, found, event) for rule in _RULES for found in rule(around)]


def _notable(host: str, found: NodeFinding, event: str) -> UnusualFigure:
    when = f" around {event}" if found.lasted else f", {when_text(found.at_s, event)}"
    value = float(f"{found.value:.4g}")
    return UnusualFigure(
        host, found.of, found.what, value, found.unit, round(found.at_s, 1), f"{host}: {found.text}{when}"
    )


def _uncorrected(node: NodeSeries) -> Iterator[NodeFinding]:
    yield from _grown(node, "ecc_uncorrected", lambda of, n: f"{n} new uncorrectable ECC error{_s(n)} on {of}")


def _clocks(node: NodeSeries) -> Iterator[NodeFinding]:
    for of in node.of("clocks_hw_slowdown"):
        for what, text in _HELD.items():
            held = node.get(of, what)
            if held is None or not held.share >= CLOCKS_HELD:
                continue
            over_s = float(numpy.nansum(held.over_s))
            sentence = (
                f"{of}: {text}{_beside(node, of)}, for {time_text(held.share * over_s)} of the {time_text(over_s)}"
            )
            yield NodeFinding(of, what, held.share, "share", _last(held), sentence, lasted=True)
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
        yield NodeFinding(HOST, "steal", peak[0], "share", peak[1], text)


def _swapping(node: NodeSeries) -> Iterator[NodeFinding]:
    for what, text in (("swap_in", "read {} a second from swap"), ("swap_out", "wrote {} a second to swap")):
        peak, used = _peak(node.get(HOST, what)), _peak(node.get(HOST, "swap_used"))
        if peak is not None and peak[0] >= SWAPPING:
            in_use = f", {size_text(used[0])} of it in use" if used is not None else ""
            yield NodeFinding(HOST, what, peak[0], "bytes/s", peak[1], f"it {text.format(size_text(peak[0]))}{in_use}")
            return


def _memory(node: NodeSeries) -> Iterator[NodeFinding]:
    for used, limit, text in (
        ("job_memory_used", "job_memory_limit", "the job used {} of the {} of memory that it may"),
        ("memory_used", "memory_total", "{} of {} of memory were in use"),
    ):
        peak, most = _peak(node.get(HOST, used)), _peak(node.get(HOST, limit))
        if peak is not None and most is not None and peak[0] >= MEMORY_FULL * most[0] > 0:
            sentence = text.format(size_text(peak[0]), size_text(most[0]))
            yield NodeFinding(HOST, used, peak[0], "bytes", peak[1], sentence)
            return


def _infiniband(node: NodeSeries) -> Iterator[NodeFinding]:
    yield from _grown(node, "ib_errors", lambda of, n: f"{n} new error{_s(n)} of its InfiniBand port {of}")


def _network(node: NodeSeries) -> Iterator[NodeFinding]:
    yield from _grown(node, "net_errors", lambda of, n: f"{n} new error{_s(n)} of its network interfaces")


def _corrected(node: NodeSeries) -> Iterator[NodeFinding]:
    yield from _grown(node, "ecc_corrected", lambda of, n: f"{n} new corrected ECC error{_s(n)} on {of}")


def _held_back(node: NodeSeries) -> Iterator[NodeFinding]:
    held = node.get(HOST, "job_cpu_held")
    if held is not None and held.share >= CPU_HELD:
        text = f"the job's own processor limit held it back in {share_text(held.share)} of the time"
        yield NodeFinding(HOST, "job_cpu_held", held.share, "share", _last(held), text, lasted=True)


def _disk(node: NodeSeries) -> Iterator[NodeFinding]:
    for of in node.of("disk_free"):
        free, size = node.get(of, "disk_free"), node.get(of, "disk_size")
        if free is None or size is None:
            continue
        least = int(free.values.argmin())
        left = float(free.values[least])
        if left < DISK_FREE * float(size.values.max()):
            yield NodeFinding(
                of, "disk_free", left, "bytes", float(free.at_s[least]), f"{size_text(left)} were left in its {of}"
            )


def _open_files(node: NodeSeries) -> Iterator[NodeFinding]:
    for of in node.of("open_files"):
        peak, most = _peak(node.get(of, "open_files")), _peak(node.get(of, "open_files_limit"))
        if peak is not None and most is not None and peak[0] >= OPEN_FILES * most[0] > 0:
            text = f"{of} had {peak[0]:.0f} of {most[0]:.0f} files open that it may"
            yield NodeFinding(of, "open_files", peak[0], "", peak[1], text)


_RULES: tuple[Callable[[NodeSeries], Iterator[NodeFinding]], ...] = (
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


def _grown(node: NodeSeries, what: str, text: Callable[[str, int], str]) -> Iterator[NodeFinding]:
    for of in node.of(what):
        series = node.get(of, what)
        assert series is not None
        number = round(float(numpy.nansum(series.values)))
        if number > 0:
            yield NodeFinding(of, what, number, "", _last(series), text(of, number))


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


def _s(number: int) -> str:
    return "s" if number != 1 else ""


# How the host and the GPU of a slow rank did over the run, beside those of the others. Pure.

Value = Callable[[FigureSamples], float]
_HOT = ("clocks_hw_thermal", "clocks_sw_thermal")
_POWER = ("clocks_hw_power_brake", "clocks_hw_slowdown")


def _mean(series: FigureSamples) -> float:
    return float(series.values.mean())


def _highest(series: FigureSamples) -> float:
    return float(series.values.max())


def _share(series: FigureSamples) -> float:
    return series.share


_HOST: tuple[tuple[str, Value, str], ...] = (
    ("cpu", _share, "{} of its processors in use"),
    ("steal", _share, "{} stolen by other virtual machines"),
    ("iowait", _share, "{} waiting for disks"),
    ("job_cpu_held", _share, "held back by the job's processor limit in {} of the time"),
)
_GPU: tuple[tuple[str, Value, str, str], ...] = (
    ("sm_clock", _mean, "SM clock {:.0f} MHz on average", "{:.0f} MHz"),
    ("temperature", _highest, "up to {:.0f} C", "{:.0f} C"),
    ("gpu_use", _mean, "{:.0%} in use", "{:.0%}"),
)


def beside_slow(node: NodeSeries | None, gpu: str, others: Iterable[NodeSeries]) -> list[str]:
    """Lines about the slow rank's host, and its GPU if `gpu` is its UUID. `others` are the other nodes."""
    if node is None:
        return []
    others = list(others)
    return [*_host_line(node, others), *_gpu_line(node, gpu, others)]


def _host_line(node: NodeSeries, others: list[NodeSeries]) -> Iterator[str]:
    parts = []
    for what, value, text in _HOST:
        own = _known(node, HOST, what, value)
        if own is not None and (own >= 0.005 or what == "cpu"):
            rest = _of_others([(other, HOST) for other in others], what, value)
            parts.append(text.format(share_text(own)) + (f" (the others: {share_text(rest)})" if rest else ""))
    swapped = sum(_known(node, HOST, what, _share) or 0.0 for what in ("swap_in", "swap_out"))
    if swapped >= 1024:
        parts.append(f"swapping {size_text(swapped)} a second")
    if parts:
        yield f"its host {node.host} over the run: {', '.join(parts)}"


def _gpu_line(node: NodeSeries, gpu: str, others: list[NodeSeries]) -> Iterator[str]:
    own_gpu = next((of for of in node.of("sm_clock") + node.of("temperature") if _bare(of) == _bare(gpu)), None)
    if own_gpu is None:
        return
    rest = [(each, of) for each in (node, *others) for of in each.of("sm_clock") if (each, of) != (node, own_gpu)]
    parts = []
    for what, value, text, short in _GPU:
        own = _known(node, own_gpu, what, value)
        if own is not None:
            other = _of_others(rest, what, value)
            parts.append(text.format(own) + (f" (the others: {short.format(other)})" if other is not None else ""))
    for reasons, text in ((_HOT, "hot"), (_POWER, "short of power")):
        held = max((_known(node, own_gpu, what, _share) or 0.0 for what in reasons), default=0.0)
        if held >= 0.005:
            parts.append(f"its clocks held down for {share_text(held)} of the time because it was {text}")
    yield f"its GPU {own_gpu} over the run: {', '.join(parts)}"


def _of_others(others: list[tuple[NodeSeries, str]], what: str, value: Value) -> float | None:
    found = [own for node, of in others if (own := _known(node, of, what, value)) is not None]
    return median(found) if found else None


def _known(node: NodeSeries, of: str, what: str, value: Value) -> float | None:
    series = node.get(of, what)
    found = value(series) if series is not None else float("nan")
    return found if numpy.isfinite(found) else None


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-")
