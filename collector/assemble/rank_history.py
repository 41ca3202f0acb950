"""How it came to an overflow: abs max of what modules returned, over the batches and over the ranks."""

from __future__ import annotations

import math

from ...core.values import DTYPE_MAX
from ...core.verdicts import VerdictKind
from ...core.wire.columns import NO_NUMBER
from ..facts.facts import RankFacts, RunFacts
from ..facts.kept_pages import ModuleOutputs, OpenHistory
from ..report.model import HeatModule, ModuleHistory, ModulesByRanks, RankSeries, Verdict

MOST_RANKS = 256
"""Ranks whose history a report holds: of more, the verdict's, those that met something, and some others."""
_MOST_POINTS = 8192
_MOST_CELLS = 8192


Opened = tuple[dict[int, OpenHistory], int]
"""By rank, and how many ranks have one that is not here, or cannot be read."""


def open_histories(facts: RunFacts, verdict: Verdict, attempt: int) -> Opened:
    """Those of the verdict's root; where it is about none, of the first root that there is."""
    ranks = facts.of_attempt(attempt)
    roots = [kept.root for rank in ranks for kept in rank.histories.values()]
    root = verdict.root if verdict.root is not None else next(iter(roots), None)
    there = [rank for rank in ranks if any(kept.root == root for kept in rank.histories.values())]
    chosen = _chosen(there, verdict)
    opened = {rank.rank: found for rank in chosen if (found := _open(rank, root)) is not None}
    return opened, len(there) - len(opened)


def histories(opened: Opened, verdict: Verdict) -> tuple[ModuleHistory | None, ModulesByRanks | None]:
    """None each, where the verdict is about no module or no history has come."""
    if verdict.kind != VerdictKind.OVERFLOW or verdict.module is None:
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
    returned = ModuleOutputs(verdict.module or "", verdict.cls or "", verdict.dtype or "")
    most = max(32, min(512, _MOST_POINTS // max(1, len(opened))))
    for rank, history in opened.items():
        column = next((n for n, each in enumerate(history.modules) if each.module == verdict.module), None)
        if column is None:
            continue
        if rank == verdict.rank or not returned.dtype:
            returned = history.modules[column]
        points = [
            (batch, _number(number))
            for batch, number in zip(history.batches, history.numbers[:, column].tolist(), strict=True)
            if number != NO_NUMBER
        ][-most:]
        if points:
            found.append(RankSeries(rank, [batch for batch, _ in points], [number for _, number in points]))
    if not found:
        return None
    return ModuleHistory(*returned, DTYPE_MAX.get(returned.dtype), found, left_out)


def _over_ranks(opened: dict[int, OpenHistory], verdict: Verdict) -> ModulesByRanks | None:
    place = verdict.batch, verdict.step
    rows: dict[int, tuple[OpenHistory, int]] = {}
    for rank, history in opened.items():
        at = next((n for n, at in enumerate(zip(history.batches, history.steps, strict=True)) if at == place), None)
        if at is not None:
            rows[rank] = history, at
    if verdict.rank not in rows or verdict.batch is None:
        return None
    named, at = rows[verdict.rank]
    there = dict.fromkeys(
        each for each, number in zip(named.modules, named.numbers[at].tolist(), strict=True) if number != NO_NUMBER
    )
    for history, _ in rows.values():
        if history.modules is not named.modules:
            there.update(dict.fromkeys(history.modules))
    modules = list({each.module: each for each in reversed(there)}.values())[::-1]
    modules = _around(modules, verdict.module, max(24, min(200, _MOST_CELLS // len(rows))))
    return ModulesByRanks(
        verdict.batch,
        [HeatModule(*each) for each in modules],
        sorted(rows),
        [_row(*rows[rank], modules) for rank in sorted(rows)],
    )


def _around(modules: list[ModuleOutputs], name: str | None, most: int) -> list[ModuleOutputs]:
    """At most so many: more of those in front of the verdict's than behind it."""
    if len(modules) <= most:
        return modules
    at = next((n for n, each in enumerate(modules) if each.module == name), 0)
    first = min(max(0, at - most * 3 // 4), len(modules) - most)
    return modules[first : first + most]


def _row(history: OpenHistory, at: int, modules: list[ModuleOutputs]) -> list[float | None]:
    column = {each.module: n for n, each in enumerate(history.modules)}
    numbers = history.numbers[at].tolist()
    return [_number(numbers[column[each.module]]) if each.module in column else NO_NUMBER for each in modules]


def _number(number: float) -> float | None:
    """What was kept has no more than three digits."""
    return float(f"{number:.3g}") if math.isfinite(number) else None
