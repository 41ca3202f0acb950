"""Insights: findings over ranks, modules and batches that are no verdict, the most harmful first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy

from ...core.codes import Code
from ...core.frames import LOSS_MODULE, FramePhase, RowMark
from ...core.roles import GRADIENTS, parse_role
from ...core.signal_errors import from_outside
from ...core.values import DTYPE_MAX
from ..decide.odd_replicas import odd_tensors
from ..facts.diagnosis import number_text
from ..facts.kept_pages import KeptPage, OpenHistory
from ..facts.rank_facts import RankFacts
from ..facts.replicas import peers_of
from ..facts.run_facts import RunFacts
from ..report.run_figures import RunInsight
from ..report.sentence_parts import coarse_share_text, grouped, modules_text, where_text
from .flow_remarks import gradients_stopped, parts_unmoved
from .step_remarks import gradients_zeroed, weights_unmoved
from .timeline import forecasts_of, limit_text, passing_text

MENDS = {
    Code.REPLICA_ODD: "Look at what fills it on that rank: a broadcast that it missed, to_empty() with nothing after "
    "it. If it agreed before and no code changes it there, check the memory of that GPU or host (nvidia-smi -q -d "
    "ECC,ROW_REMAPPER; dmesg).",
    Code.REPLICA_DRIFT: "Replicas must take the same steps: look for parameters outside of DDP, and for steps of only "
    "some ranks.",
    Code.SCALER_COLLAPSING: "A scale that only falls means gradients that are inf or nan at any scale: look at that "
    "module's backward.",
    Code.GRADIENTS_ZEROED: "",
    Code.WEIGHTS_UNMOVED: "",
    Code.DEAD_ACTIVATION: "",
    Code.GRADIENT_STOPPED: "",
    Code.PARTS_UNMOVED: "",
    Code.GROWTH: "Keep them from growing (learning rate, decay, a norm in front), or compute them in bfloat16 or "
    "float32.",
    Code.NEAR_OVERFLOW: "Compute these modules in bfloat16 or float32, or keep their values from growing.",
    Code.RANK_UNLIKE: "Compare its data and its weights with another rank's; if those are alike, test its GPU: "
    "gpuwatch check.",
    Code.NO_SCALER: "Scale the loss (torch.amp.GradScaler), or compute in bfloat16.",
    Code.DEAD_MODULE: "It learns nothing: look at its inputs and at what comes before its activation.",
    Code.SCALER_TOO_SMALL: "The GradScaler's scale is too small for them: look at why it does not grow.",
    Code.UNDERFLOW: "Compute these modules in bfloat16 or float32, which reach further down.",
    Code.OWN_FAULT: "",
}
"""Code -> what to do about it; empty where the insight itself brings it. The most harmful first."""


def find_insights(facts: RunFacts, attempt: int, opened: dict[int, OpenHistory]) -> list[RunInsight]:
    """All insights of one attempt. A kind that fails costs the others nothing.

    `opened`: the histories of ranks, by rank.
    """
    ranks = facts.of_attempt(attempt)
    kinds: list[Callable[[], Iterator[RunInsight]]] = [
        lambda: unlike_replicas(facts, ranks),
        lambda: scaler_collapsing(ranks),
        lambda: gradients_zeroed(ranks),
        lambda: weights_unmoved(ranks),
        lambda: gradients_stopped(ranks),
        lambda: parts_unmoved(ranks),
        lambda: growth(ranks),
        lambda: infinite_losses(ranks),
        lambda: warned_rows(ranks),
        lambda: ranks_unlike(opened),
        lambda: dead_modules(opened),
    ]
    found: list[RunInsight] = []
    for kind in kinds:
        try:
            found += kind()
        except Exception as error:  # it is made of what came over the network; the report must be written all the same
            if from_outside(error):
                raise
            text = f"one kind could not be determined: {type(error).__name__}: {error}"
            found.append(_insight(Code.OWN_FAULT, text, [], []))
    return sorted(found, key=lambda insight: list(MENDS).index(Code(insight.code)))


def _insight(
    code: Code, text: str, ranks: Iterable[int], modules: Iterable[str], since: int | None = None
) -> RunInsight:
    return RunInsight.of(code, text, MENDS[code], ranks, modules, since)


# From modules that grow, rows near overflow or in underflow, and the steps that a GradScaler skipped.

MANY_SKIPS = 5
"""Steps in a row. A scaler that settles skips one or two."""
_SMALL_SCALE = 1.0
_MOST_PAGES = 4
"""Pages of all ranks that are searched for gradients that a GradScaler checks."""


def growth(ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """One insight for all modules: if one module's outputs grow, those of later modules grow, too."""
    found = forecasts_of(ranks)
    if not found:
        return
    first, modules = found[0], [each.module for each in found]
    told = {rank for each in found for rank in each.ranks}
    met = [rank.diagnosis for rank in ranks if rank.diagnosis is not None and rank.diagnosis.module in modules]
    then = min(met, key=lambda diagnosis: diagnosis.batch, default=None)
    grew = f"outputs of {modules_text(modules)} grew towards {first.dtype}'s limit of {limit_text(first.limit)}"
    where = where_text(told, [rank.rank for rank in ranks])
    text = f"{grew} {where}: in batch {first.batch} of rank {first.rank}, {passing_text(first)}"
    if then is not None:
        text += f"; `{then.module}` overflowed in batch {then.batch}"
    yield _insight(Code.GROWTH, text, told, modules, first.since)


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
    where = where_text(bad, [rank.rank for rank in ranks])
    text = f"GradScaler skipped {worst.in_a_row} steps in a row {where}, the last at scale {worst.scale:g}"
    first = f"; the first bad gradient was {worst.value} in {worst.role} of `{worst.module}`" if worst.module else ""
    modules = (skip.module for skip in bad.values() if skip.module)
    since = min(skip.where.batch for skip in bad.values())
    yield _insight(Code.SCALER_COLLAPSING, text + first, bad, modules, since)


def infinite_losses(ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """Losses of float16 that were inf, where no gradient was (core/judge.py)."""
    healthy = (rank for rank in ranks if rank.diagnosis is None)
    first = {rank.rank: row for rank in healthy for row in reversed(rank.warned) if row.phase == FramePhase.LOSS}
    if first:
        since = min(row.where.batch for row in first.values())
        where = where_text(first, [rank.rank for rank in ranks])
        text = (
            f"the loss was inf in float16 {where} since batch {since}: no alarm, as no gradient was inf or nan with it"
        )
        mend = "If no scale of the script's makes it inf, compute the loss in float32."
        yield RunInsight.of(Code.NEAR_OVERFLOW, text, mend, first, [LOSS_MODULE], since)


def warned_rows(ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """One for each kind and dtype, of gradients and of outputs apart."""
    rows = ((rank.rank, row) for rank in ranks for row in rank.warned if row.phase != FramePhase.LOSS)
    groups = grouped(rows, lambda row: (row[1].kind, row[1].dtype, parse_role(row[1].role).kind in GRADIENTS))
    for (kind, dtype, is_gradient), group in sorted(groups.items()):
        numbers, warnings = zip(*group, strict=True)
        modules = list(dict.fromkeys(warning.module for warning in warnings))
        since = min(warning.where.batch for warning in warnings)
        what = f"{'gradients' if is_gradient else 'outputs'} of {modules_text(modules)}"
        where = f"{where_text(numbers, [rank.rank for rank in ranks])} since batch {since}"
        if kind == "near overflow":
            left = [1e9 if warning.headroom is None else warning.headroom for warning in warnings]
            _, number, worst = min(zip(left, numbers, warnings, strict=True), key=lambda entry: entry[:2])
            limit = number_text(DTYPE_MAX[dtype]) if dtype in DTYPE_MAX else "its limit"
            first = f"{number_text(worst.abs_max)} in {worst.role} of `{worst.module}`"
            text = f"{what} came close to {dtype}'s limit of {limit} {where}; the first time at {first}"
            insight, text = Code.NEAR_OVERFLOW, f"{text}, rank {number}, batch {worst.where.batch}"
        else:
            lost = max(max(warning.subnormals or 0.0, warning.zeros or 0.0) for warning in warnings)
            insight, more = _in_underflow(dtype, _scaler(ranks)) if is_gradient else (Code.UNDERFLOW, "")
            share = f"up to {coarse_share_text(lost)} of their elements"
            text = f"{what} lie below {dtype}'s smallest normal number {where}, {share}{more}"
        yield _insight(insight, text, numbers, modules, since)


def _in_underflow(dtype: str, scaler: bool | None) -> tuple[Code, str]:
    """(code of the insight for gradients, ending of its sentence)"""
    if dtype == "float16" and not scaler:
        return Code.NO_SCALER, ": no GradScaler is in use" if scaler is False else ": no GradScaler was seen"
    return Code.SCALER_TOO_SMALL if scaler else Code.UNDERFLOW, ""


def _scaler(ranks: list[RankFacts]) -> bool | None:
    """Whether a GradScaler is in use; None if no received gradient shows it."""
    if any(rank.skipped_steps for rank in ranks):
        return True
    pages = [page for rank in ranks for page in rank.pages.values() if page.has_backward]
    frames = (frame for page in pages[:_MOST_PAGES] for frame in page.frames if frame.phase == FramePhase.BACKWARD)
    marks = {bool(row.mark & RowMark.SCALED) for frame in frames for row in frame.rows}
    return max(marks, default=None)


# Replicas whose weights agreed once and do not any more.

_MOST_PEERS = 8
_MOST_ODD = 16
Summary = tuple[float | None, float | None, int]


def unlike_replicas(facts: RunFacts, ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """What one rank alone holds differently, by its hashes; else weights that all agreed once, by their extremes."""
    odd = grouped(odd_tensors(ranks), lambda each: (each.rank, each.since, each.agreed_in))
    for (rank, since, agreed_in), found in list(odd.items())[:_MOST_ODD]:
        names = [f"`{each.name}`" for each in found]
        what = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        kind = "buffer" if all(each.is_buffer for each in found) else "weight"
        several = len(found) > 1
        before = f", and agreed in batch {agreed_in}" if agreed_in is not None else ""
        text = f"{what} ({f'{kind}s' if several else kind}) differ{'' if several else 's'} on rank {rank} since batch "
        others = f"on the {found[0].ranks - 1} other ranks" if found[0].ranks > 2 else "on the other rank"
        modules = [each.name.rpartition(".")[0] for each in found]
        yield _insight(Code.REPLICA_ODD, f"{text}{since}{before}: not as {others}", [rank], modules, since)
    if not odd:
        yield from replica_drift(facts, ranks)


def replica_drift(facts: RunFacts, ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """Weights that differ between ranks now, and that all agreed at an earlier point of the training."""
    for rank in ranks:
        pages = sorted((page for page in rank.pages.values() if page.complete), key=lambda page: page.number)
        if len(pages) >= 2:
            yield from _drift_between(facts, rank, pages[0], pages[-1], [each.rank for each in ranks])
            return


def _drift_between(
    facts: RunFacts, rank: RankFacts, then: KeptPage, now: KeptPage, everyone: list[int]
) -> Iterator[RunInsight]:
    before = _weights(facts, rank, then)
    if then.root != now.root or not before:
        return
    after = _weights(facts, rank, now)
    shared = sorted(set(before) & set(after))
    if len(shared) < 2 or _differing([before[number] for number in shared]):
        return
    differing = _differing([after[number] for number in shared])
    if not differing:
        return
    module, role = differing[0]
    one = shared[0]
    other = next(number for number in shared if after[number][module, role] != after[one][module, role])
    sizes = [f"{number_text(after[number][module, role][1])} on rank {number}" for number in (one, other)]
    modules = list(dict.fromkeys(name for name, _ in differing))
    differ = f"weights of {modules_text(modules)} are not the same {where_text(shared, everyone)} in batch {now.batch}"
    text = f"{differ}, but all agreed in batch {then.batch}: {role} of `{module}` has abs max {', '.join(sizes)}"
    yield _insight(Code.REPLICA_DRIFT, text, shared, modules, now.batch)


def _weights(facts: RunFacts, rank: RankFacts, page: KeptPage) -> dict[int, dict[tuple[str, str], Summary]]:
    peers = dict(sorted(peers_of(facts, page).items())[:_MOST_PEERS])
    return {
        number: {key: (row.abs_min, row.abs_max, row.flags) for key, row in found.weights().items()}
        for number, found in {rank.rank: page, **peers}.items()
    }


def _differing(copies: list[dict[tuple[str, str], Summary]]) -> list[tuple[str, str]]:
    """The weights that are not the same on all ranks. One that a rank lacks is not compared."""
    first = copies[0]
    shared = [key for key in first if all(key in copy for copy in copies)]
    return [key for key in shared if any(copy[key] != first[key] for copy in copies)]


# From how large the outputs were over the batches: modules that return zeros, a rank that is unlike the others.

_LAST = 16
"""The last batches that are compared. At least half of them must be there."""
_APART = 4.0
"""Powers of two between a rank and the median of the others."""
_ALIKE = 1.0
_MOST_RANKS = 3
_MOST_COMPARED = 64
_FEWEST_COMPARED = 4
"""Among fewer ranks there is no odd one."""


def dead_modules(opened: dict[int, OpenHistory]) -> Iterator[RunInsight]:
    """Modules that returned nothing but zeros in all of the last batches, on every rank that has them."""
    alive: set[str] = set()
    dead: dict[str, list[tuple[int, int]]] = {}
    """The first of these batches, and the rank."""
    for rank, history in opened.items():
        numbers = history.numbers[-_LAST:]
        if len(numbers) < _LAST // 2:
            continue
        known = numbers >= 0  # neither nan nor NO_NUMBER
        zeros = (numpy.where(known, numbers, -1.0).max(axis=0) == 0) & (known.sum(axis=0) >= _LAST // 2)
        for module, is_dead in zip(history.modules, zeros, strict=True):
            if is_dead:
                dead.setdefault(module.module, []).append((history.batches[-len(numbers)], rank))
            else:
                alive.add(module.module)
    found = [module for module in dead if module not in alive]
    if found:
        ranks = {rank for module in found for _, rank in dead[module]}
        since = min(batch for module in found for batch, _ in dead[module])
        where = where_text(ranks, list(opened))
        text = f"{modules_text(found)} returned nothing but zeros {where}, at least since batch {since}"
        yield _insight(Code.DEAD_MODULE, text, ranks, found, since)


def ranks_unlike(opened: dict[int, OpenHistory]) -> Iterator[RunInsight]:
    """A rank whose module output differs from the (mutually similar) outputs of all other ranks."""
    ranks = sorted(opened)[:_MOST_COMPARED]
    batches = sorted(set.intersection(*(set(opened[rank].batches[-_LAST:]) for rank in ranks))) if ranks else []
    if len(ranks) < _FEWEST_COMPARED or len(batches) < _LAST // 2:
        return
    shared = set.intersection(*({each.module for each in opened[rank].modules} for rank in ranks))
    modules = [each.module for each in opened[ranks[0]].modules if each.module in shared]
    numbers = numpy.stack([_aligned(opened[rank], batches, modules) for rank in ranks])
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
        apart_by = f"at least {2**least:.0f} times {'larger' if larger else 'smaller'} there"
        outputs = f"the outputs of `{module}` are {apart_by} in each of the last {len(batches)} batches"
        text = f"rank {ranks[place]} is unlike the other ranks: {outputs}{more}"
        modules_of_it = [name for _, name in sorted(found, reverse=True)]
        yield _insight(Code.RANK_UNLIKE, text, [ranks[place]], modules_of_it, batches[0])


def _aligned(history: OpenHistory, batches: list[int], modules: list[str]) -> Any:
    """Powers of two, of shape (batches, modules); nan where a number is no finite one above zero."""
    place = {batch: n for n, batch in enumerate(history.batches)}
    at = {each.module: n for n, each in enumerate(history.modules)}
    chosen = history.numbers[numpy.ix_([place[batch] for batch in batches], [at[module] for module in modules])]
    return numpy.log2(numpy.where((chosen > 0) & numpy.isfinite(chosen), chosen, numpy.nan))
