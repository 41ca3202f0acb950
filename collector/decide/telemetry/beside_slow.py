"""How the host and the GPU of a slow rank did over the run, beside those of the others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median

import numpy

from ....core.telemetry.metrics import HOST
from .amounts import share_text, size_text
from .node_series import NodeSeries, Series

Value = Callable[[Series], float]
_HOT = ("clocks_hw_thermal", "clocks_sw_thermal")
_POWER = ("clocks_hw_power_brake", "clocks_hw_slowdown")


def _mean(series: Series) -> float:
    return float(series.values.mean())


def _highest(series: Series) -> float:
    return float(series.values.max())


def _share(series: Series) -> float:
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
    """The median; None without any."""
    found = [own for node, of in others if (own := _known(node, of, what, value)) is not None]
    return median(found) if found else None


def _known(node: NodeSeries, of: str, what: str, value: Value) -> float | None:
    series = node.get(of, what)
    found = value(series) if series is not None else float("nan")
    return found if numpy.isfinite(found) else None


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-")
