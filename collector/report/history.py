"""How it came to an overflow: abs max of what modules returned, over the batches and over the ranks."""

from __future__ import annotations

import math

import msgspec

from ...core.values import DTYPE_MAX
from ..decide.verdict_model import Verdict
from ..facts.facts import RankFacts, RunFacts
from ..facts.kept_history import OpenHistory

MOST_RANKS = 256
"""Ranks whose history a report holds: of more, the verdict's, those that met something, and some others."""
_MOST_POINTS = 8192
_MOST_CELLS = 8192
ABSENT = -1.0


class RankSeries(msgspec.Struct, frozen=True):
    """One rank. `abs_max` is null where it was inf or nan."""

    rank: int
    batches: list[int]
    abs_max: list[float | None]


class ModuleHistory(msgspec.Struct, frozen=True):
    """What the verdict's module returned, on each rank, over the batches as that rank counts them."""

    module: str
    cls: str = msgspec.field(name="class")
    dtype: str
    limit: float | None
    """The largest finite number of the dtype."""
    ranks: list[RankSeries]
    left_out: int = 0
    """Ranks that have a history and are not here."""


class HeatModule(msgspec.Struct, frozen=True):
    """One module."""

    module: str
    cls: str = msgspec.field(name="class")
    dtype: str


class ModulesByRanks(msgspec.Struct, frozen=True):
    """What modules returned in the batch that the verdict is about, on each rank that was there at the same step."""

    batch: int
    modules: list[HeatModule]
    """In the order of their first calls, up to the verdict's and beyond it."""
    ranks: list[int]
    abs_max: list[list[float | None]]
    """Of each rank. null: inf or nan; -1: not measured."""


Opened = tuple[dict[int, OpenHistory], int]
"""By rank, and how many ranks have one that is not here."""


def open_histories(facts: RunFacts, verdict: Verdict, attempt: int) -> Opened:
    """Those of the verdict's root; where it is about none, of the first root that there is."""
    ranks = facts.of_attempt(attempt)
    roots = [kept.root for rank in ranks for kept in rank.histories.values()]
    root = verdict.root if verdict.root is not None else next(iter(roots), None)
    there = [rank for rank in ranks if any(kept.root == root for kept in rank.histories.values())]
    chosen = _chosen(there, verdict)
    return {rank.rank: found for rank in chosen if (found := _open(rank, root)) is not None}, len(there) - len(chosen)


def histories(opened: Opened, verdict: Verdict) -> tuple[ModuleHistory | None, ModulesByRanks | None]:
    """None each, where the verdict is about no module or no history has come."""
    if verdict.kind != "overflow" or verdict.module is None:
        return None, None
    found, left_out = opened
    return _over_batches(found, verdict, left_out), _over_ranks(found, verdict)


def _chosen(ranks: list[RankFacts], verdict: Verdict) -> list[RankFacts]:
    if len(ranks) <= MOST_RANKS:
        return ranks
    first = [rank for rank in ranks if rank.rank == verdict.rank]
    first += [rank for rank in ranks if rank.rank != verdict.rank and rank.diagnosis is not None]
    others = [rank for rank in ranks if rank.rank != verdict.rank and rank.diagnosis is None]
    left = max(0, MOST_RANKS - len(first))
    first += [others[n * len(others) // left] for n in range(min(left, len(others)))]
    return sorted(first[:MOST_RANKS], key=lambda rank: rank.rank)


def _open(rank: RankFacts, root: str | None) -> OpenHistory | None:
    kept = next((each for each in rank.histories.values() if each.root == root), None)
    return kept.open() if kept is not None else None


def _over_batches(opened: dict[int, OpenHistory], verdict: Verdict, left_out: int) -> ModuleHistory | None:
    found: list[RankSeries] = []
    cls, dtype = verdict.cls or "", verdict.dtype or ""
    most = max(32, min(512, _MOST_POINTS // max(1, len(opened))))
    for rank, history in opened.items():
        columns = [
            n for n, column in enumerate(history.columns) if column is not None and column.module == verdict.module
        ]
        if not columns:
            continue
        if rank == verdict.rank or not dtype:
            column = history.columns[columns[0]]
            assert column is not None
            cls, dtype = column.cls, column.dtype
        largest = history.numbers[:, columns].max(axis=1)  # of numbers and nan it is nan
        points = [
            (batch, _number(number))
            for batch, number in zip(history.batches, largest.tolist(), strict=True)
            if number != ABSENT
        ][-most:]
        if points:
            found.append(RankSeries(rank, [batch for batch, _ in points], [number for _, number in points]))
    if not found:
        return None
    return ModuleHistory(verdict.module or "", cls, dtype, DTYPE_MAX.get(dtype), found, left_out)


def _over_ranks(opened: dict[int, OpenHistory], verdict: Verdict) -> ModulesByRanks | None:
    rows: dict[int, dict[str, float]] = {}
    known: dict[str, HeatModule] = {}
    for rank, history in opened.items():
        place = next(
            (
                n
                for n, at in enumerate(zip(history.batches, history.steps, strict=True))
                if at == (verdict.batch, verdict.step)
            ),
            None,
        )
        if place is None:
            continue
        row = rows[rank] = {}
        for column, number in zip(history.columns, history.numbers[place].tolist(), strict=True):
            if column is not None and number != ABSENT:
                known.setdefault(column.module, HeatModule(*column))
                row[column.module] = _larger(row.get(column.module), number)
    if verdict.rank not in rows or verdict.batch is None:
        return None
    modules = list(known)
    most = max(24, min(200, _MOST_CELLS // len(rows)))
    if len(modules) > most:
        at = modules.index(verdict.module) if verdict.module in known else 0
        first = min(max(0, at - most * 3 // 4), len(modules) - most)
        modules = modules[first : first + most]
    return ModulesByRanks(
        verdict.batch,
        [known[module] for module in modules],
        sorted(rows),
        [[_number(rows[rank].get(module, ABSENT)) for module in modules] for rank in sorted(rows)],
    )


def _larger(one: float | None, other: float) -> float:
    return other if one is None or math.isnan(other) or other > one else one


def _number(number: float) -> float | None:
    """What was kept has no more than three digits."""
    return float(f"{number:.3g}") if math.isfinite(number) else None
