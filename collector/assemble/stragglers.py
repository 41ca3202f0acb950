"""Which rank the others wait for in every step, or now and then, and what that costs the job. Pure.

A rank's own time in a step excludes waiting for others. Among ranks that keep step with each other, the slow one has
the most own time and waits the least. Its cost to the job is its own time beyond the median of the others', as a share
of the step; at most the time that the others have waited longer than it.

This is no verdict. A rank is named only if it is clear: the same one in both halves of the run, in several steps, and
no other rank is half as slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy

from ...core.recorder.layout import PARTS, WAITING
from ...core.signal_errors import suppress_own
from ...core.text import size_text
from ...core.wire.columns import HOST, unpack_steps
from ..decide.decide import gpu_lines, gpu_of, uuid_of
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..report.run_figures import RankStepTotals, StepReport, StragglerReport
from ..report.sentence_parts import share_text
from .slow_lines import lines_of, where_it_was
from .timeline import FigureSamples, NodeSeries, series_of_all

WARN = 0.10
"""Share of the job's time from which on a slow rank is reported."""
LOUD = 0.20
WARM_UP = 3
"""The first steps of a run are not compared: each rank compiles, opens its files, and waits for the others."""
LEAST_STEPS = 16
"""Steps that all ranks have in common."""
LEAST_SLOW = 4
"""Steps in which a rank must be slow."""
_SHORT_STEP_S, _MANY_STEPS = 0.05, 200
"""Shorter steps differ between ranks by chance: only so many of them show a slow rank."""
_ALWAYS = 0.8
"""Share of the steps in which a rank is slow that is so constantly."""
_MOST_OF_IT = 0.6
_OTHERS_AT_MOST = 0.5
"""The cost of any other rank, as a share of the slow one's."""


RankTimes = tuple[list[int], Any]
"""A sample of one rank's steps: their numbers, and float64 seconds of shape (steps, parts)."""


@dataclass(frozen=True)
class SlowRank:
    """One rank that the others wait for."""

    rank: int
    cost: float
    """Share of the job's time that it costs."""
    part: str
    """Which of PARTS has most of the difference; "" if none has."""
    how: Literal["", "constantly", "now and then"] = ""
    """This and what follows is known of steps that are compared one by one."""
    slow_steps: int = 0
    own_s: float = 0.0
    """Its own time in the steps in which it is slow, and the median of the others', without waiting."""
    others_s: float = 0.0

    @property
    def loud(self) -> bool:
        """Whether it is a large share."""
        return self.cost >= LOUD


class StepComparison(NamedTuple):
    """The result of comparing the ranks' steps."""

    steps: int
    """Steps that were compared."""
    step_s: float
    """Mean time of a step."""
    slow: list[SlowRank]


def find_stragglers(ranks: Mapping[int, RankTimes]) -> StepComparison | None:
    """None if there is too little to compare."""
    shared = set.intersection(*(set(numbers) for numbers, _ in ranks.values())) if len(ranks) > 1 else set()
    common = sorted(number for number in shared if number > WARM_UP)
    if len(common) < LEAST_STEPS:
        return None
    places = [{number: n for n, number in enumerate(numbers)} for numbers, _ in ranks.values()]
    rows = zip(places, ranks.values(), strict=True)
    table = numpy.stack([parts[[place[number] for number in common]] for place, (_, parts) in rows])
    own = table.sum(axis=2) - table[:, :, WAITING]
    step_s, late = _lateness(table)
    if step_s <= 0:
        return None
    n = _clear_one(late) if step_s >= _SHORT_STEP_S or len(common) >= _MANY_STEPS else None
    if n is None:
        return StepComparison(len(common), step_s, [])
    slow = late[n] >= WARN
    how: Literal["constantly", "now and then"] = "constantly" if slow.mean() >= _ALWAYS else "now and then"
    own_s, others_s = (float(seconds[slow].mean()) for seconds in (own[n], _median_of_others(own, n)))
    rank, cost, part = list(ranks)[n], float(late[n].mean()), _part_of(table, n, slow)
    return StepComparison(len(common), step_s, [SlowRank(rank, cost, part, how, int(slow.sum()), own_s, others_s)])


def find_slow_now(ranks: list[int], means: Any) -> SlowRank | None:
    """From the means over the same stretch of all ranks' steps, without the steps one by one. None if none is clear.

    `means`: float64 seconds of the parts of a step, of shape (ranks, parts).
    """
    table = means[:, None, :]
    step_s, late = _lateness(table)
    slow = _costliest(late[:, 0]) if step_s > 0 else None
    if slow is None:
        return None
    return SlowRank(ranks[slow], float(late[slow, 0]), _part_of(table, slow, numpy.array([True])))


def _lateness(table: Any) -> tuple[float, Any]:
    """(mean time of a step, how late each rank is in each step, as a share of that)."""
    waited = table[:, :, WAITING]
    own = table.sum(axis=2) - waited
    step_s = float(numpy.median(own + waited, axis=0).mean())
    beyond = numpy.stack([own[n] - _median_of_others(own, n) for n in range(len(own))])
    less = numpy.stack([_median_of_others(waited, n) - waited[n] for n in range(len(own))])
    return step_s, numpy.minimum(beyond, less) / (step_s or 1.0)


def _costliest(costs: Any) -> int | None:
    """The one rank that costs enough, if no other costs half as much."""
    first = int(costs.argmax())
    if costs[first] < WARN or numpy.delete(costs, first).max() > _OTHERS_AT_MOST * costs[first]:
        return None
    return first


def _median_of_others(values: Any, rank: int) -> Any:
    return numpy.median(numpy.delete(values, rank, axis=0), axis=0)


def _clear_one(late: Any) -> int | None:
    """The one rank that is clearly slow. `late`: of each rank and step, as a share of the mean step."""
    first = _costliest(late.mean(axis=1))
    if first is None:
        return None
    halves = numpy.array_split(late[first], 2)
    enough = min(LEAST_SLOW // 2, 2)
    if any(half.mean() < WARN / 2 or (half >= WARN).sum() < enough for half in halves):
        return None
    return first if (late[first] >= WARN).sum() >= LEAST_SLOW else None


def _part_of(table: Any, n: int, slow: Any) -> str:
    """Which part has most of what the n-th rank takes beyond the others in its slow steps; "" if none has."""
    beyond = (table[n] - _median_of_others(table, n))[slow].mean(axis=0)
    beyond[WAITING] = 0
    largest = int(beyond.argmax())
    positive = float(beyond[beyond > 0].sum())
    return PARTS[largest] if beyond[largest] >= _MOST_OF_IT * positive else ""


# Where the ranks' time goes, part by part of a step; and a rank that the others wait for.

PART_TEXT = {
    "outside": "between the steps: data loading, or what else the script does there",
    "forward": "in the forward",
    "backward": "in the backward",
    "optimizer": "in the optimizer's step, or just before it",
}


def step_report(facts: RunFacts, attempt: int, named: int | None) -> StepReport | None:
    """None if no rank has timed a step. `named`: the verdict's rank. Beside it no other rank is called slow."""
    ranks = facts.of_attempt(attempt)
    timed = [rank for rank in ranks if rank.step_times is not None]
    if not timed:
        return None
    shown, sampled = [], {}
    for rank in timed:
        times = rank.step_times
        assert times is not None
        seconds = {part: round(second, 3) for part, second in zip(PARTS, times.total_s, strict=False)}
        shown.append(RankStepTotals(rank.rank, times.timed, seconds))
        with suppress_own(ValueError):  # bytes that no agent sends
            sampled[rank.rank] = unpack_steps(times.steps)
    found = find_stragglers(sampled) if len(sampled) == len(ranks) else None
    if found is None:
        return StepReport(shown)
    by_rank = {rank.rank: rank for rank in timed}
    shown_slow = [slow for slow in found.slow if named in (None, slow.rank)]
    slow_ranks = [_straggler(facts, by_rank[slow.rank], slow, found) for slow in shown_slow]
    return StepReport(shown, found.steps, float(f"{found.step_s:.3g}"), slow_ranks)


def _straggler(facts: RunFacts, rank: RankFacts, slow: SlowRank, found: StepComparison) -> StragglerReport:
    host, device, gpu = facts.host(rank), rank.device, gpu_of(facts, rank)
    nodes = series_of_all(facts, None)
    own = nodes.pop(rank.agent, None)
    place = ", ".join(filter(None, (device, f"on {host}" if host else "")))
    many = str(slow.slow_steps) if slow.how == "now and then" else "nearly all"
    when = f"{slow.how}, in {many} of {found.steps} steps that were compared"
    text = f"Rank {slow.rank} costs the job {slow.cost:.0%} of its time: the others wait for it {when}. "
    text += f"It then takes {_time(slow.own_s)} a step without waiting, the others {_time(slow.others_s)}"
    text += f"; most of the difference is {PART_TEXT[slow.part]}." if slow.part else "."
    seen = rank.slow_looks
    own_s, others_s = _own_times(facts, rank)
    text += f" {said}" if (said := where_it_was(seen, own_s, others_s)) else ""
    text += f" It is {place}." if place else ""
    beside = [*beside_slow(own, uuid_of(rank), nodes.values()), *(gpu_lines(gpu) if gpu is not None else [])]
    cost = round(slow.cost, 3)
    looks, lines = (seen.looks, lines_of(seen)) if seen is not None else (0, [])
    return StragglerReport(slow.rank, host, device, cost, slow.loud, slow.how, slow.part, text, beside, looks, lines)


def _own_times(facts: RunFacts, rank: RankFacts) -> tuple[float, float]:
    """Mean seconds of a step over the run without waiting: the rank's, and the median of the others'."""
    own = {
        each.rank: (sum(times.total_s) - times.total_s[WAITING]) / times.timed
        for each in facts.of_attempt(rank.attempt)
        if (times := each.step_times) is not None and times.timed > 0 and len(times.total_s) == len(PARTS)
    }
    mine = own.pop(rank.rank, 0.0)
    return mine, median(own.values()) if own else mine


def _time(seconds: float) -> str:
    """`0.31 s`, `12 ms`"""
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


# The host and the GPU of a slow rank over the run, beside those of the others.

Value = Callable[[FigureSamples], float]
_SHARE: Value = attrgetter("share")
_HOST = {
    "cpu": "{} of its processors in use",
    "steal": "{} stolen by other virtual machines",
    "iowait": "{} waiting for disks",
    "job_cpu_held": "throttled by the job's processor limit in {} of the time",
}
_GPU: tuple[tuple[str, Value, str, str], ...] = (
    ("sm_clock", lambda series: series.values.mean(), "SM clock {:.0f} MHz on average", "{:.0f} MHz"),
    ("temperature", lambda series: series.values.max(), "up to {:.0f} C", "{:.0f} C"),
    ("gpu_use", lambda series: series.values.mean(), "{:.0%} in use", "{:.0%}"),
)
_HELD_DOWN = {
    "hot": ("clocks_hw_thermal", "clocks_sw_thermal"),
    "short of power": ("clocks_hw_power_brake", "clocks_hw_slowdown"),
}


def beside_slow(node: NodeSeries | None, gpu: str, others: Iterable[NodeSeries]) -> list[str]:
    """Lines about the slow rank's host, and its GPU if `gpu` is its UUID. `others` are the other nodes."""
    rest = list(others)
    return [*_host_line(node, rest), *_gpu_line(node, gpu, rest)] if node is not None else []


def _host_line(node: NodeSeries, others: list[NodeSeries]) -> Iterator[str]:
    parts = []
    for what, text in _HOST.items():
        own = _known(node, HOST, what)
        if own is not None and (own >= 0.005 or what == "cpu"):
            rest = _of_others([(other, HOST) for other in others], what, _SHARE)
            parts.append(text.format(share_text(own)) + (f" (the others: {share_text(rest)})" if rest else ""))
    swapped = sum(_known(node, HOST, what) or 0.0 for what in ("swap_in", "swap_out"))
    if swapped >= 1024:
        parts.append(f"swapping {size_text(swapped)} a second")
    if parts:
        yield f"its host {node.host} over the run: {', '.join(parts)}"


def _gpu_line(node: NodeSeries, gpu: str, others: list[NodeSeries]) -> Iterator[str]:
    uuid = gpu.removeprefix("GPU-")
    own_gpu = next((of for of in node.of("sm_clock") + node.of("temperature") if of.removeprefix("GPU-") == uuid), None)
    if own_gpu is None:
        return
    rest = [(each, of) for each in (node, *others) for of in each.of("sm_clock") if (each, of) != (node, own_gpu)]
    parts = []
    for what, value, text, short in _GPU:
        own = _known(node, own_gpu, what, value)
        if own is not None:
            other = _of_others(rest, what, value)
            parts.append(text.format(own) + (f" (the others: {short.format(other)})" if other is not None else ""))
    for text, reasons in _HELD_DOWN.items():
        held = max(_known(node, own_gpu, what) or 0.0 for what in reasons)
        if held >= 0.005:
            parts.append(f"its clocks throttled for {share_text(held)} of the time because it was {text}")
    yield f"its GPU {own_gpu} over the run: {', '.join(parts)}"


def _of_others(others: list[tuple[NodeSeries, str]], what: str, value: Value) -> float | None:
    found = [own for node, of in others if (own := _known(node, of, what, value)) is not None]
    return median(found) if found else None


def _known(node: NodeSeries, of: str, what: str, value: Value = _SHARE) -> float | None:
    series = node.get(of, what)
    found = float(value(series)) if series is not None else float("nan")
    return found if numpy.isfinite(found) else None
