"""The two batches that are compared: chosen among what the stores hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...core.errors import UsageError
from ...core.frames import Frame
from ...core.recorder.page_tables import whole
from ...core.text.ranks_text import numbers_text
from ..decide.verdict import decide
from ..facts.facts import RankFacts, RunFacts
from ..facts.kept_pages import KeptPage


class Side(msgspec.Struct, frozen=True):
    """One of the two batches."""

    run: str
    rank: int
    attempt: int
    root: str
    batch: int
    step: int
    complete: bool
    """Nothing of it was overwritten or cut off before it was read."""


class Chosen(NamedTuple):
    """Both sides with their frames."""

    sides: tuple[Side, Side]
    frames: tuple[list[Frame], list[Frame]]


class Wish(NamedTuple):
    """What a user asks for on one side; None is not said."""

    run: str
    facts: RunFacts
    rank: int | None
    batch: int | None


def choose(a: Wish, b: Wish) -> Chosen:
    """The batches that were asked for. Where none was: that of the verdict's overflow, else the last that both have.

    Raises UsageError when a rank or a batch is not there.
    """
    ranks = _rank(a, None), _rank(b, a)
    pages = [_pages(wish, rank) for wish, rank in zip((a, b), ranks, strict=True)]
    if a.batch is None and b.batch is None:
        wanted = _in_common(decide(a.facts).batch, pages)
        batches = wanted, wanted
    else:
        batches = _either(a.batch, b.batch), _either(b.batch, a.batch)
    first = _page(a, ranks[0], pages[0], batches[0], None)
    second = _page(b, ranks[1], pages[1], batches[1], first.root)
    return Chosen(
        (_side(a, ranks[0], first), _side(b, ranks[1], second)),
        ([whole(frame) for frame in first.frames], [whole(frame) for frame in second.frames]),
    )


def _either(wanted: int | None, other: int | None) -> int:
    found = wanted if wanted is not None else other
    assert found is not None
    return found


def _rank(wish: Wish, other: Wish | None) -> RankFacts:
    there = wish.facts.of_attempt(wish.facts.last_attempt)
    wanted = wish.rank
    if wanted is None and other is not None:
        wanted = _rank(other, None).rank
    if wanted is None:
        verdict = decide(wish.facts)
        there = wish.facts.of_attempt(verdict.attempt) if verdict.attempt is not None else there
        wanted = verdict.rank if verdict.rank is not None else next((r.rank for r in there if r.pages), 0)
    found = next((rank for rank in there if rank.rank == wanted), None)
    if found is None:
        raise UsageError(
            f"--rank: expected a rank of run {wish.run} ({numbers_text([r.rank for r in there])}), found {wanted}"
        )
    return found


def _pages(wish: Wish, rank: RankFacts) -> dict[int, list[KeptPage]]:
    pages: dict[int, list[KeptPage]] = {}
    for page in rank.pages.values():
        pages.setdefault(page.batch, []).append(page)
    if not pages:
        raise UsageError(
            f"expected batches of rank {rank.rank} in the store of run {wish.run}, found none; a run keeps that of an "
            "overflow, the one before it and the last of each rank; more: gpuwatch launch --trace-batches N,N"
        )
    return pages


def _in_common(of_verdict: int | None, pages: Sequence[dict[int, list[KeptPage]]]) -> int:
    both = set(pages[0]) & set(pages[1])
    if of_verdict in both:
        assert of_verdict is not None
        return of_verdict
    if not both:
        has = " and ".join(f"{numbers_text(sorted(side))} ({name})" for name, side in zip("AB", pages, strict=True))
        raise UsageError(f"--batch: expected a batch that both sides have, found {has}; choose with --batch N,N")
    return max(both)


def _page(wish: Wish, rank: RankFacts, pages: dict[int, list[KeptPage]], batch: int, root: str | None) -> KeptPage:
    if batch not in pages:
        raise UsageError(
            f"--batch: expected a batch of rank {rank.rank} that is in the store of run {wish.run} "
            f"({numbers_text(sorted(pages))}), found {batch}; more: gpuwatch launch --trace-batches N,N"
        )
    same = [page for page in pages[batch] if root is None or page.root == root]
    return max(same or pages[batch], key=lambda page: page.num_frames)


def _side(wish: Wish, rank: RankFacts, page: KeptPage) -> Side:
    complete = page.complete and not page.lost_frames
    return Side(wish.run, rank.rank, rank.attempt, page.root, page.batch, page.step, complete)
