"""The same point of a training on two ranks: which page of another rank may be compared with a page. Pure.

Every rank numbers its own batches. Where rank 0 alone evaluates, its batch 33 is an earlier step than rank 1's:

    rank 0    batch 30: evaluation, step 20    batch 31: training, step 20
    rank 1                                     batch 20: training, step 20

Batch 31 of rank 0 and batch 20 of rank 1 are the same point: both have the same root, the same optimizer step and the
same number of collectives at the start of their first call, and both are training.
"""

from __future__ import annotations

from ....core.recorder.lone_process import is_rank
from ...diagnose.calls import begun
from ...facts.facts import RankFacts, RunFacts
from ...facts.kept_pages import KeptPage


def page_at_same_point(rank: RankFacts, page: KeptPage, other: RankFacts) -> KeptPage | None:
    """The page of `other` that is the same point as this page of `rank`; None if none is known to be."""
    if not is_rank(rank.rank) or not is_rank(other.rank):
        return None  # a process that is no rank trains by itself: its steps are its own
    same_step = [found for found in other.pages.of_step(page.step) if found.root == page.root]
    alike = [found for found in same_step if _is_alike(rank, page, other, found)]
    same_batch = next((found for found in alike if found.batch == page.batch), None)
    if same_batch is not None:
        return same_batch
    same_number = (found for found in other.pages.of_batch(page.batch) if found.root == page.root)
    apart = any(found.step != page.step for found in same_number)
    return alike[0] if apart and len(alike) == 1 else None


def peers_of(facts: RunFacts, rank: RankFacts, page: KeptPage) -> dict[int, KeptPage]:
    """The pages of the other ranks that are the same point as this page of `rank`. Looked for once."""
    key = (rank.attempt, rank.rank, page.number)
    if key not in facts.peers:
        found = {
            other.rank: page_at_same_point(rank, page, other)
            for other in facts.of_attempt(rank.attempt)
            if other.rank != rank.rank
        }
        facts.peers[key] = {number: other for number, other in found.items() if other is not None}
    return facts.peers[key]


def _is_alike(rank: RankFacts, page: KeptPage, other: RankFacts, found: KeptPage) -> bool:
    if not _begin_alike(page, found):
        return False
    is_training, is_too = _is_training(rank, page), _is_training(other, found)
    if is_training is None or is_too is None:
        # an evaluation may stand beside a training, unless the ranks have counted the same batches
        return False not in (is_training, is_too) or not _are_apart(rank, other)
    return is_training == is_too


def _begin_alike(page: KeptPage, found: KeptPage) -> bool:
    """Whether as many collectives had been issued when the first call began, as far as that can be compared."""
    mine, theirs = page.first_frame, found.first_frame
    if mine is None or theirs is None:
        return True
    if (mine.module, mine.phase) != (theirs.module, theirs.phase):
        return True
    return begun(mine) == begun(theirs) or min(begun(mine), begun(theirs)) < 0


def _is_training(rank: RankFacts, page: KeptPage) -> bool | None:
    """Whether a batch had a backward; None if its forward was not finished, or no backward of the rank was seen."""
    if page.has_backward:
        return True
    return False if page.complete and rank.pages.any_backward else None


def _are_apart(rank: RankFacts, other: RankFacts) -> bool:
    """Whether two ranks have ended in the same step and have counted different batches."""
    mine, theirs = _last_place(rank), _last_place(other)
    return mine is not None and theirs is not None and mine[0] == theirs[0] and mine[1] != theirs[1]


def _last_place(rank: RankFacts) -> tuple[int, int] | None:
    """(step, batch) where a rank was seen last."""
    where = rank.exit.where if rank.exit is not None else rank.state
    return (where.step, where.batch) if where is not None else None
