"""All insights of one attempt, the most harmful first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy

from ...core.events import RangeWarning
from ...core.frames import FramePhase, RowMark, format_number
from ...core.roles import GRADIENTS, parse_role
from ...core.values import DTYPE_MAX
from ...core.wire.columns import NO_NUMBER
from ..decide.replicas import peers_of
from ..facts.facts import RankFacts, RunFacts
from ..facts.kept_pages import KeptPage, OpenHistory
from ..report.model import RunInsight, modules_text, where_text
from ..report.notices_text import share_text
from .forecasts import growth

# From rows near overflow or in underflow, and from the steps that a GradScaler skipped.

MANY_SKIPS = 5
"""Steps in a row. A scaler that settles skips one or two."""
_SMALL_SCALE = 1.0
_MOST_PAGES = 4
"""Of the ranks' pages so many are searched for gradients that a GradScaler checks."""

Group = list[tuple[int, RangeWarning]]


def scaler_collapsing(ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """Many skipped steps in a row, or a scale that has nothing left to give."""
    bad = {
        rank.rank: skip
        for rank in ranks
        for skip in rank.scaler_skips
        if skip.in_a_row >= MANY_SKIPS or skip.scale < _SMALL_SCALE
    }
    if not bad:
        return
    worst = max(bad.values(), key=lambda skip: (skip.in_a_row, -skip.scale))
    modules = list(dict.fromkeys(skip.module for skip in bad.values() if skip.module))
    first = f"; the first bad gradient was {worst.value} in {worst.role} of `{worst.module}`" if worst.module else ""
    yield RunInsight(
        "scaler_collapsing",
        f"GradScaler skipped {worst.in_a_row} steps in a row {where_text(bad, [r.rank for r in ranks])}, its scale was "
        f"down to {worst.scale:g}{first}",
        "A scale that only falls means gradients that are inf or nan at any scale: look at that module's backward.",
        sorted(bad),
        modules,
        min(skip.where.batch for skip in bad.values()),
    )


def warned_rows(ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """One for each kind and dtype, of gradients and of outputs apart."""
    groups: dict[tuple[str, str, bool], Group] = {}
    for rank in ranks:
        for warned in rank.warned:
            is_gradient = parse_role(warned.role).kind in GRADIENTS
            groups.setdefault((warned.kind, warned.dtype, is_gradient), []).append((rank.rank, warned))
    everyone = [rank.rank for rank in ranks]
    for (kind, dtype, is_gradient), group in sorted(groups.items()):
        if kind == "near overflow":
            yield _near_overflow(group, dtype, is_gradient, everyone)
        else:
            yield _underflow(group, dtype, is_gradient, everyone, _scaler(ranks))


def _scaler(ranks: list[RankFacts]) -> bool | None:
    """Whether a GradScaler is in use; None where no gradient was received that could tell."""
    if any(rank.skipped_steps for rank in ranks):
        return True
    seen = False
    pages = [page for rank in ranks for page in rank.pages.values() if page.has_backward]
    for page in pages[:_MOST_PAGES]:
        for frame in page.frames:
            if frame.phase == FramePhase.BACKWARD:
                for row in frame.rows:
                    if row.mark & RowMark.SCALED:
                        return True
                    seen = True
    return False if seen else None


def _near_overflow(group: Group, dtype: str, is_gradient: bool, everyone: list[int]) -> RunInsight:
    modules = _modules(group)
    number, worst = min(
        group, key=lambda entry: (entry[1].headroom if entry[1].headroom is not None else 1e9, entry[0])
    )
    what = "gradients" if is_gradient else "outputs"
    largest = format_number(worst.abs_max).strip()
    limit = format_number(DTYPE_MAX[dtype]).strip() if dtype in DTYPE_MAX else "its limit"
    return RunInsight(
        "near_overflow",
        f"{what} of {modules_text(modules)} came close to {dtype}'s limit of {limit} {_where(group, everyone)}; the "
        f"first time at {largest} in {worst.role} of `{worst.module}`, rank {number}, batch {worst.where.batch}",
        "Compute these modules in bfloat16 or float32, or keep their values from growing.",
        _ranks(group),
        modules,
        _since(group),
    )


def _underflow(group: Group, dtype: str, is_gradient: bool, everyone: list[int], scaler: bool | None) -> RunInsight:
    modules = _modules(group)
    lost = max(max(warned.subnormals or 0.0, warned.zeros or 0.0) for _, warned in group)
    what = "gradients" if is_gradient else "outputs"
    text = (
        f"{what} of {modules_text(modules)} lie below {dtype}'s smallest normal number {_where(group, everyone)}, up "
        f"to {share_text(lost)} of their elements"
    )
    kind, next_ = "underflow", "Compute these modules in bfloat16 or float32, which reach further down."
    if is_gradient and dtype == "float16" and scaler is not True:
        kind = "no_scaler"
        text += ": no GradScaler is in use" if scaler is False else ": no GradScaler was seen"
        next_ = "Scale the loss (torch.amp.GradScaler), or compute in bfloat16."
    elif is_gradient and scaler:
        kind, next_ = "scaler_too_small", "The GradScaler's scale is too small for them: look at why it does not grow."
    return RunInsight(kind, text, next_, _ranks(group), modules, _since(group))


def _where(group: Group, everyone: list[int]) -> str:
    return f"{where_text(_ranks(group), everyone)} since batch {_since(group)}"


def _modules(group: Group) -> list[str]:
    return list(dict.fromkeys(warned.module for _, warned in group))


def _ranks(group: Group) -> list[int]:
    return sorted({number for number, _ in group})


def _since(group: Group) -> int:
    return min(warned.where.batch for _, warned in group)


# Replicas whose weights agreed once and do not any more.

_MOST_PEERS = 8
Summary = tuple[float | None, float | None, int]


def replica_drift(facts: RunFacts, ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """Weights that differ between ranks now, and that all agreed at an earlier point of the training."""
    for rank in ranks:
        pages = sorted((page for page in rank.pages.values() if page.complete), key=lambda page: page.number)
        if len(pages) < 2:
            continue
        then, now = pages[0], pages[-1]
        if then.root != now.root or not (before := _weights(facts, rank, then)):
            return
        after = _weights(facts, rank, now)
        shared = sorted(set(before) & set(after))
        if len(shared) < 2 or _differing([before[number] for number in shared]):
            return
        differing = _differing([after[number] for number in shared])
        if differing:
            yield _insight(shared, after, differing, then.batch, now.batch, [each.rank for each in ranks])
        return


def _weights(facts: RunFacts, rank: RankFacts, page: KeptPage) -> dict[int, dict[tuple[str, str], Summary]]:
    peers = dict(sorted(peers_of(facts, page).items())[:_MOST_PEERS])
    return {
        number: {key: (row.abs_min, row.abs_max, row.flags) for key, row in found.weights().items()}
        for number, found in {rank.rank: page, **peers}.items()
    }


def _differing(copies: list[dict[tuple[str, str], Summary]]) -> list[tuple[str, str]]:
    """What is not the same on all ranks; a weight that one of them lacks is not compared."""
    first = copies[0]
    return [
        key for key in first if all(key in copy for copy in copies) and any(copy[key] != first[key] for copy in copies)
    ]


def _insight(
    ranks: list[int],
    weights: dict[int, dict[tuple[str, str], Summary]],
    differing: list[tuple[str, str]],
    then: int,
    now: int,
    everyone: list[int],
) -> RunInsight:
    module, role = differing[0]
    one = ranks[0]
    other = next(rank for rank in ranks if weights[rank][module, role] != weights[one][module, role])
    sizes = [format_number(weights[rank][module, role][1]).strip() for rank in (one, other)]
    modules = list(dict.fromkeys(name for name, _ in differing))
    return RunInsight(
        "replica_drift",
        f"weights of {modules_text(modules)} are not the same {where_text(ranks, everyone)} in batch {now}, and all "
        f"agreed in batch {then}: {role} of `{module}` has abs max {sizes[0]} on rank {one}, "
        f"{sizes[1]} on rank {other}",
        "Replicas must take the same steps: look for parameters outside of DDP, and for steps of only some ranks.",
        ranks,
        modules,
        now,
    )


# From how large the outputs were over the batches: modules that return zeros, a rank that is unlike the others.

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


def dead_modules(opened: dict[int, OpenHistory]) -> Iterator[RunInsight]:
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
        yield RunInsight(
            "dead_module",
            f"{modules_text(found)} returned nothing but zeros {where_text(ranks, list(opened))}, at least since batch "
            f"{since}",
            "It learns nothing: look at its inputs and at what is in front of its activation.",
            ranks,
            found,
            since,
        )


def ranks_unlike(opened: dict[int, OpenHistory]) -> Iterator[RunInsight]:
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
        yield RunInsight(
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
    numbers = history.numbers[-_LAST:]
    return [each.module for each in history.modules], numpy.where(numbers == NO_NUMBER, numpy.nan, numbers)


ORDER = (
    "replica_drift",
    "scaler_collapsing",
    "growth",
    "near_overflow",
    "rank_unlike",
    "no_scaler",
    "dead_module",
    "scaler_too_small",
    "underflow",
    "unknown",
)


def find_insights(facts: RunFacts, attempt: int, opened: dict[int, OpenHistory]) -> list[RunInsight]:
    """What values near trouble come to. One kind that cannot be told costs the others nothing.

    `opened`: the histories of ranks, by rank.
    """
    ranks = facts.of_attempt(attempt)
    kinds: list[Callable[[], Iterator[RunInsight]]] = [
        lambda: replica_drift(facts, ranks),
        lambda: scaler_collapsing(ranks),
        lambda: growth(ranks),
        lambda: warned_rows(ranks),
        lambda: ranks_unlike(opened),
        lambda: dead_modules(opened),
    ]
    found: list[RunInsight] = []
    for kind in kinds:
        try:
            found += kind()
        except Exception as error:  # it is made of what came over the network; the report must be written all the same
            found.append(
                RunInsight("unknown", f"one kind could not be told: {type(error).__name__}: {error}", "", [], [])
            )
    return sorted(found, key=lambda insight: ORDER.index(insight.kind))
