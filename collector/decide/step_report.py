"""Where the ranks' time goes, part by part of a step; and a rank that the others wait for."""

from __future__ import annotations

from ...core.recorder.step_table import PARTS
from ...core.wire.step_times import unpack_steps
from ..facts.facts import RankFacts, RunFacts
from .gpu_evidence import gpu_lines, gpu_of, uuid_of
from .step_model import RankSteps, StepReport, Straggler
from .stragglers import LOUD, Compared, RankTimes, SlowRank, find_stragglers
from .telemetry.beside_slow import beside_slow
from .telemetry.telemetry_report import series_of_all
from .words import device_of

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


def _of_rank(rank: RankFacts) -> RankSteps:
    times = rank.step_times
    assert times is not None
    seconds = {part: round(second, 3) for part, second in zip(PARTS, times.total_s, strict=False)}
    return RankSteps(rank.rank, times.timed, seconds)


def _sample(rank: RankFacts) -> RankTimes | None:
    """None for bytes that no agent sends."""
    assert rank.step_times is not None
    try:
        return RankTimes(*unpack_steps(rank.step_times.steps))
    except ValueError:
        return None


def _straggler(facts: RunFacts, rank: RankFacts, slow: SlowRank, found: Compared) -> Straggler:
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
    return Straggler(
        slow.rank,
        host,
        device,
        round(slow.cost, 3),
        slow.cost >= LOUD,
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
