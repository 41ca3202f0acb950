"""From how large the outputs were over the batches: modules that return zeros, a rank that is unlike the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy

from ....core.wire.history import NO_NUMBER
from ...facts.kept_history import OpenHistory
from .insight import Insight, modules_text, where_text

_LAST = 16
"""So many of the last batches are looked at, and at least half as many must be there."""
_APART = 4.0
"""Powers of two between a rank and the median of the others."""
_ALIKE = 1.0
_MOST_RANKS = 3
_MOST_COMPARED = 64
_FEWEST_COMPARED = 4
"""Of fewer ranks nobody can tell which is the odd one."""
Table = tuple[list[str], Any]
"""Modules, and numbers of shape (batches, modules); nan where there is none."""


def dead_modules(opened: dict[int, OpenHistory]) -> Iterator[Insight]:
    """Modules that returned nothing but zeros in all of the last batches, on every rank that has them."""
    alive: set[str] = set()
    dead: dict[str, set[int]] = {}
    first: dict[str, int] = {}
    for rank, history in opened.items():
        modules, numbers = _table(history)
        if len(numbers) < _LAST // 2:
            continue
        largest = numpy.nanmax(numpy.where(numpy.isnan(numbers), -1.0, numbers), axis=0)
        counted = (~numpy.isnan(numbers)).sum(axis=0)
        for n, module in enumerate(modules):
            if largest[n] == 0 and counted[n] >= _LAST // 2:
                dead.setdefault(module, set()).add(rank)
                first[module] = min(
                    first.get(module, history.batches[-1]), history.batches[len(history.batches) - len(numbers)]
                )
            else:
                alive.add(module)
    found = [module for module in dead if module not in alive]
    if found:
        ranks = sorted(set().union(*(dead[module] for module in found)))
        since = min(first[module] for module in found)
        yield Insight(
            "dead_module",
            f"{modules_text(found)} returned nothing but zeros {where_text(ranks, list(opened))}, at least since batch "
            f"{since}",
            "It learns nothing: look at its inputs and at what is in front of its activation.",
            ranks,
            found,
            since,
        )


def ranks_unlike(opened: dict[int, OpenHistory]) -> Iterator[Insight]:
    """A rank whose module returns something far from what it returns on the others, which are alike."""
    ranks = sorted(opened)[:_MOST_COMPARED]
    batches = sorted(set.intersection(*(set(opened[rank].batches[-_LAST:]) for rank in ranks))) if ranks else []
    if len(ranks) < _FEWEST_COMPARED or len(batches) < _LAST // 2:
        return
    tables = [_table(opened[rank]) for rank in ranks]
    shared = set(tables[0][0]).intersection(*(names for names, _ in tables[1:]))
    modules = [module for module in tables[0][0] if module in shared]
    numbers = numpy.stack(
        [
            _aligned(opened[rank], names, table, batches, modules)
            for rank, (names, table) in zip(ranks, tables, strict=True)
        ]
    )
    middle = numpy.median(numbers, axis=0)
    apart = numpy.abs(numbers - middle)
    nearest, furthest = apart.min(axis=1), numpy.sort(apart.max(axis=1), axis=0)
    alone = furthest[-2] <= _ALIKE
    told: dict[int, list[tuple[float, str]]] = {}
    for place, column in numpy.argwhere((nearest >= _APART) & alone):
        told.setdefault(int(place), []).append((float(nearest[place, column]), modules[column]))
    for place, found in sorted(told.items(), key=lambda entry: -max(entry[1])[0])[:_MOST_RANKS]:
        least, module = max(found)
        larger = bool((numbers[place] > middle)[:, modules.index(module)].all())
        more = f", and so are those of {len(found) - 1} more modules" if len(found) > 1 else ""
        yield Insight(
            "rank_unlike",
            f"rank {ranks[place]} is unlike the other ranks: the outputs of `{module}` are at least {2**least:.0f} "
            f"times {'larger' if larger else 'smaller'} there in each of the last {len(batches)} batches{more}",
            "Compare its data and its weights with another rank's; if those are alike, test its GPU: gpuwatch check.",
            [ranks[place]],
            [name for _, name in sorted(found, reverse=True)],
            batches[0],
        )


def _aligned(history: OpenHistory, names: list[str], table: Any, batches: list[int], modules: list[str]) -> Any:
    """Powers of two, of shape (batches, modules); nan where a number is no finite one above zero."""
    place = {batch: n for n, batch in enumerate(history.batches[len(history.batches) - len(table) :])}
    at = {name: n for n, name in enumerate(names)}
    chosen = table[numpy.ix_([place[batch] for batch in batches], [at[module] for module in modules])]
    return numpy.log2(numpy.where((chosen > 0) & numpy.isfinite(chosen), chosen, numpy.nan))


def _table(history: OpenHistory) -> Table:
    """Of the last batches."""
    numbers = history.numbers[-_LAST:]
    return [each.module for each in history.modules], numpy.where(numbers == NO_NUMBER, numpy.nan, numbers)
