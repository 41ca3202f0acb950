"""Modules that were about to pass their dtype's limit, as the node agents saw it while the ranks ran."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...core.events import LimitForecast
from ...core.frames import format_number
from ..report.model import ModuleForecast, RunInsight, modules_text, where_text

if TYPE_CHECKING:
    from ..facts.facts import RankFacts

_MOST_MODULES = 64


def forecasts_of(ranks: list[RankFacts]) -> list[ModuleForecast]:
    """By module, what was told first in front."""
    told: dict[str, list[LimitForecast]] = {}
    for rank in ranks:
        for forecast in rank.forecasts:
            if is_sound(forecast):
                told.setdefault(forecast.module, []).append(forecast)
    found = []
    for module, group in told.items():
        first = min(group, key=lambda forecast: (forecast.where.batch, forecast.after, forecast.where.rank))
        found.append(
            ModuleForecast(
                module,
                first.cls,
                first.dtype,
                first.limit,
                sorted({forecast.where.rank for forecast in group}),
                first.where.rank,
                first.where.batch,
                float(f"{first.abs_max:.3g}"),
                first.after,
                first.earliest,
                first.latest,
                first.since,
            )
        )
    return sorted(found, key=lambda each: (each.batch, -_depth(each.module), each.after, each.module))[:_MOST_MODULES]


def _depth(module: str) -> int:
    """A module stands before those around it, which return what it has returned."""
    return module.count(".") + (module != "")


def growth(ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """One for all of them: what is behind a module that grows does, too."""
    found = forecasts_of(ranks)
    if not found:
        return
    first = found[0]
    modules = [each.module for each in found]
    told = sorted({rank for each in found for rank in each.ranks})
    met = [rank.diagnosis for rank in ranks if rank.diagnosis is not None and rank.diagnosis.module in modules]
    then = min(met, key=lambda diagnosis: diagnosis.batch, default=None)
    text = (
        f"outputs of {modules_text(modules)} grew towards {first.dtype}'s limit of {limit_text(first.limit)} "
        f"{where_text(told, [rank.rank for rank in ranks])}: in batch {first.batch} of rank {first.rank}, "
        f"{passing_text(first)}"
    )
    if then is not None:
        text += f"; `{then.module}` overflowed in batch {then.batch}"
    yield RunInsight(
        "growth",
        text,
        "Keep them from growing (learning rate, decay, a norm in front), or compute them in bfloat16 or float32.",
        told,
        modules,
        first.since,
    )


def passing_text(told: ModuleForecast | LimitForecast) -> str:
    """`` `fc2` was at 4.10e+03, to pass it in about 40 batches (30 to 60) ``"""
    name = f"`{told.module}`" if told.module else "the root"
    size = format_number(told.abs_max).strip()
    return f"{name} was at {size}, to pass it in about {told.after} batches ({told.earliest} to {told.latest})"


def limit_text(limit: float) -> str:
    """`65504`, `3.39e+38`"""
    return f"{limit:.0f}" if limit < 1e6 else format_number(limit).strip()


def is_sound(forecast: LimitForecast) -> bool:
    """Whether its numbers are some: it has come over the network."""
    numbers: Iterable[float] = (forecast.limit, forecast.abs_max)
    return all(math.isfinite(number) and number > 0 for number in numbers)
