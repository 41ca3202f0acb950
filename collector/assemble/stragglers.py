"""Which rank the others wait for in every step, or now and then, and what that costs the job. Pure.

A rank's own time in a step is what it takes without waiting for others. Of ranks that keep step with each other, the
slow one has the most of it and waits the least. What it costs the job is its own time beyond the median of the
others', as a share of the step; and not more than the others have waited beyond it.

It is no verdict. A rank is named only if that is clear: the same one in both halves of the run, in several steps, and
no other rank is half as slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from ...core.recorder.step_table import PARTS, WAITING
from ...core.wire.columns import unpack_steps
from ..decide.decide import gpu_lines, gpu_of, uuid_of
from ..decide.words import device_of
from ..facts.facts import RankFacts, RunFacts
from ..report.model import RankStepTotals, StepReport, StragglerReport
from .node_telemetry import series_of_all
from .stands_out import beside_slow

WARN = 0.10
"""Of the job's time, from which on a slow rank is told."""
LOUD = 0.20
WARM_UP = 3
"""The first steps of a run are not compared: each rank compiles, opens its files, and waits for the others."""
LEAST_STEPS = 16
"""Steps that all ranks have in common."""
LEAST_SLOW = 4
"""Steps in which a rank must be slow."""
_ALWAYS = 0.8
"""Share of the steps in which a rank is slow that is so constantly."""
_MOST_OF_IT = 0.6
_OTHERS_AT_MOST = 0.5
"""The cost of any other rank, as a share of the slow one's."""


@dataclass(frozen=True)
class RankTimes:
    """A sample of one rank's steps: their numbers, and float64 seconds of shape (steps, parts)."""

    numbers: list[int]
    parts: Any


@dataclass(frozen=True)
class SlowRank:
    """One rank that the others wait for."""

    rank: int
    cost: float
    """Share of the job's time that it takes."""
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


@dataclass(frozen=True)
class StepComparison:
    """What a comparison of the ranks' steps has shown."""

    steps: int
    """Steps that were compared."""
    step_s: float
    """Mean time of a step."""
    slow: list[SlowRank]


def find_stragglers(ranks: Mapping[int, RankTimes]) -> StepComparison | None:
    """None if there is too little to compare."""
    common = sorted(set.intersection(*(set(times.numbers) for times in ranks.values()))) if len(ranks) > 1 else []
    common = [number for number in common if number > WARM_UP]
    if len(common) < LEAST_STEPS:
        return None
    table = numpy.stack([_rows(times, common) for times in ranks.values()])
    own = table.sum(axis=2) - table[:, :, WAITING]
    step_s, late = _lateness(table)
    if step_s <= 0:
        return None
    slow = _clear_one(late)
    if slow is None:
        return StepComparison(len(common), step_s, [])
    return StepComparison(len(common), step_s, [_told(list(ranks)[slow], slow, late[slow], own, table)])


def find_slow_now(ranks: list[int], means: Any) -> SlowRank | None:
    """Of the same stretch of all ranks' steps, without the steps one by one. None if none is clear.

    `means`: float64 seconds of the parts of a step, of shape (ranks, parts).
    """
    table = means[:, None, :]
    step_s, late = _lateness(table)
    costs = late[:, 0]
    slow = _costliest(costs) if step_s > 0 else None
    if slow is None:
        return None
    return SlowRank(ranks[slow], float(costs[slow]), _part_of(table, slow, numpy.array([True])))


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


def _rows(times: RankTimes, numbers: list[int]) -> Any:
    place = {number: n for n, number in enumerate(times.numbers)}
    return times.parts[[place[number] for number in numbers]]


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


def _told(rank: int, n: int, late: Any, own: Any, table: Any) -> SlowRank:
    slow = late >= WARN
    return SlowRank(
        rank,
        float(late.mean()),
        _part_of(table, n, slow),
        "constantly" if slow.mean() >= _ALWAYS else "now and then",
        int(slow.sum()),
        float(own[n][slow].mean()),
        float(_median_of_others(own, n)[slow].mean()),
    )


def _part_of(table: Any, n: int, slow: Any) -> str:
    """Which part has most of what the n-th rank takes beyond the others in its slow steps; "" if none has."""
    others = numpy.median(numpy.delete(table, n, axis=0), axis=0)
    beyond = (table[n] - others)[slow].mean(axis=0)
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


def step_report(facts: RunFacts, attempt: int) -> StepReport | None:
    """None if no rank has timed a step. If it cannot be told, everything else in the report is there all the same."""
    try:
        return _step_report(facts, attempt)
    except Exception as error:  # it is made of what came over the network
        return StepReport([], trouble=f"where the time goes could not be told: {type(error).__name__}: {error}")


def _step_report(facts: RunFacts, attempt: int) -> StepReport | None:
    ranks = facts.of_attempt(attempt)
    timed = [rank for rank in ranks if rank.step_times is not None]
    if not timed:
        return None
    shown = [_of_rank(rank) for rank in timed]
    sampled = {rank.rank: times for rank in timed if (times := _sample(rank)) is not None}
    found = find_stragglers(sampled) if len(sampled) == len(ranks) else None
    if found is None:
        return StepReport(shown)
    by_rank = {rank.rank: rank for rank in timed}
    return StepReport(
        shown,
        found.steps,
        float(f"{found.step_s:.3g}"),
        [_straggler(facts, by_rank[slow.rank], slow, found) for slow in found.slow],
    )


def _of_rank(rank: RankFacts) -> RankStepTotals:
    times = rank.step_times
    assert times is not None
    seconds = {part: round(second, 3) for part, second in zip(PARTS, times.total_s, strict=False)}
    return RankStepTotals(rank.rank, times.timed, seconds)


def _sample(rank: RankFacts) -> RankTimes | None:
    """None for bytes that no agent sends."""
    assert rank.step_times is not None
    try:
        return RankTimes(*unpack_steps(rank.step_times.steps))
    except ValueError:
        return None


def _straggler(facts: RunFacts, rank: RankFacts, slow: SlowRank, found: StepComparison) -> StragglerReport:
    host, device = facts.host(rank), device_of(rank)
    gpu = gpu_of(facts, rank)
    place = ", ".join(part for part in (device, f"on {host}" if host else "") if part)
    steps = (
        f"in {slow.slow_steps} of {found.steps} steps that were compared"
        if slow.how == "now and then"
        else f"in nearly all of {found.steps} steps that were compared"
    )
    text = (
        f"Rank {slow.rank} costs the job {slow.cost:.0%} of its time: the others wait for it {slow.how}, {steps}. It "
        f"then takes {_time(slow.own_s)} a step without waiting, the others {_time(slow.others_s)}"
    )
    text += f"; most of the difference is {PART_TEXT[slow.part]}." if slow.part else "."
    text += f" It is {place}." if place else ""
    return StragglerReport(
        slow.rank,
        host,
        device,
        round(slow.cost, 3),
        slow.loud,
        slow.how,
        slow.part,
        text,
        [*_telemetry(facts, rank), *(gpu_lines(gpu) if gpu is not None else [])],
    )


def _telemetry(facts: RunFacts, rank: RankFacts) -> list[str]:
    nodes = series_of_all(facts, None)
    own = nodes.pop(rank.agent, None)
    return beside_slow(own, uuid_of(rank), nodes.values())


def _time(seconds: float) -> str:
    """`0.31 s`, `12 ms`"""
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"
