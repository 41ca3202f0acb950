"""Replicas whose weights agreed once and do not any more."""

from __future__ import annotations

from collections.abc import Iterator

from ....core.frames import format_number
from ...facts.facts import RankFacts, RunFacts
from ...facts.kept_pages import KeptPage
from ..overflow.same_point import peers_of
from .insight import Insight, modules_text, where_text

_MOST_PEERS = 8
Summary = tuple[float | None, float | None, int]


def replica_drift(facts: RunFacts, ranks: list[RankFacts]) -> Iterator[Insight]:
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
    """By rank, at the same point."""
    peers = dict(sorted(peers_of(facts, rank, page).items())[:_MOST_PEERS])
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
) -> Insight:
    module, role = differing[0]
    one = ranks[0]
    other = next(rank for rank in ranks if weights[rank][module, role] != weights[one][module, role])
    sizes = [format_number(weights[rank][module, role][1]).strip() for rank in (one, other)]
    modules = list(dict.fromkeys(name for name, _ in differing))
    return Insight(
        "replica_drift",
        f"weights of {modules_text(modules)} are not the same {where_text(ranks, everyone)} in batch {now}, and all "
        f"agreed in batch {then}: {role} of `{module}` has abs max {sizes[0]} on rank {one}, "
        f"{sizes[1]} on rank {other}",
        "Replicas must take the same steps: look for parameters outside of DDP, and for steps of only some ranks.",
        ranks,
        modules,
        now,
    )
