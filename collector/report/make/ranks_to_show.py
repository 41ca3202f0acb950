"""Of which ranks a report holds frames and traced batches: of a small job all, of a large one what a reader needs.

The others' are in the store: `gpuwatch report --rank N` reads them there.
"""

from __future__ import annotations

from ....core.frames import Page
from ...decide.overflow.replicas import run_the_same_model
from ...decide.overflow.same_point import peers_of
from ...decide.verdict_model import Verdict
from ...facts.facts import RankFacts, RunFacts
from .frame_selection import Target

SMALL_JOB = 32
"""Ranks of a job whose report holds frames of all ranks."""
_MOST_OF_A_KIND = 8
MOST_ROWS = 10_000
"""Of the traced batches in a report, about 4 MB of JSON."""
MOST_ROWS_OF_ONE = 200_000
"""Of a rank that was asked for."""


def ranks_to_show(
    facts: RunFacts, ranks: list[RankFacts], verdict: Verdict, target: Target | None, asked: int | None
) -> list[RankFacts]:
    """The rank that was asked for, the verdict's, those beside it, those that differ, and a healthy one like it."""
    if len(ranks) <= SMALL_JOB:
        return ranks
    concurrent = {other.rank for other in verdict.concurrent}
    cascade = {other.rank for other in verdict.cascade}
    found = [rank for rank in ranks if rank.rank == asked]
    found += [target.rank] if target is not None else []
    found += [rank for rank in ranks if rank.rank == verdict.rank]
    found += [rank for rank in ranks if rank.rank in concurrent][:_MOST_OF_A_KIND]
    found += [rank for rank in ranks if rank.diagnosis is not None and rank.rank not in concurrent][:_MOST_OF_A_KIND]
    found += [rank for rank in ranks if rank.errors and rank.rank not in cascade][:_MOST_OF_A_KIND]
    healthy = _healthy(facts, target)
    found += [healthy] if healthy is not None else []
    return list({rank.rank: rank for rank in found}.values())


def _healthy(facts: RunFacts, target: Target | None) -> RankFacts | None:
    """A rank of the same role that was at the same point and met nothing."""
    if target is None:
        return None
    for number, page in sorted(peers_of(facts, target.rank, target.page).items()):
        rank = facts.ranks[target.rank.attempt, number]
        if rank.diagnosis is None and run_the_same_model(target.page, page):
            return rank
    return None


def traces_to_show(
    facts: RunFacts, ranks: list[RankFacts], shown: list[RankFacts], asked: int | None
) -> dict[int, tuple[list[Page], int]]:
    """By rank: its traced batches, as many as there is room for, and how many are left out."""
    wanted = {batch for node in facts.nodes.values() if node.hello is not None for batch in node.hello.trace_batches}
    if not wanted:
        return {}
    found: dict[int, tuple[list[Page], int]] = {}
    room = MOST_ROWS
    held = {rank.rank for rank in shown}
    for rank in [*shown, *(rank for rank in ranks if rank.rank not in held)]:
        kept = [page for _, page in sorted(rank.pages.items()) if page.batch in wanted]
        left = MOST_ROWS_OF_ONE if rank.rank == asked else room if rank.rank in held else 0
        pages: list[Page] = []
        for page in kept:
            if page.num_rows > left and not (left == MOST_ROWS and not pages):
                break
            pages.append(page.whole())
            left -= page.num_rows
        if rank.rank != asked:
            room = min(room, max(0, left))
        found[rank.rank] = pages, len(kept) - len(pages)
    return found
