"""A weight that something else than an optimizer step made larger, a few batches before an overflow. Pure.

    after the step of batch 3     weight of `b`   0.18
    in the forward of batch 4     weight of `b`   53        no step was seen in between: the script, a load or memory

What is trained on from there runs away as a training does that diverges. Only its first batches tell the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ...core.frames import FramePhase, Row, RowKind, module_text
from ...core.growth_run import FACTOR
from .diagnosis import LocalDiagnosis
from .kept_pages import KeptPage
from .rank_facts import RankFacts
from .run_facts import RunFacts

_MOST_RANKS = 8
"""Ranks whose pages are looked through."""


@dataclass(frozen=True)
class WeightJump:
    """A weight of one module, as the last step has left it and as the next forward found it."""

    name: str
    """`weight of `b` (Linear)`"""
    batch: int
    """The one whose forward found it; the step was that of the batch before."""
    left: float
    """abs max after the step."""
    found: float
    ranks: list[int]
    """On which it was so."""
    others: list[int]
    """On which both were seen, and it was not."""


@dataclass(frozen=True)
class JumpSearch:
    """What was looked through, and what was found there."""

    first: WeightJump | None
    """The earliest one."""
    whole: bool
    """Whether all ranks that were asked for have shown all steps up to the batch that was asked for."""


def weight_jumps(facts: RunFacts, first: LocalDiagnosis, ranks: list[int], batches: range) -> JumpSearch:
    """Look for the earliest jump of a weight of the diagnosis's root that was found in one of these batches.

    `ranks`: those that must have shown every step for an answer that there is none.
    """
    asked = sorted(facts.of_attempt(first.attempt), key=lambda rank: (rank.rank not in ranks, rank.rank))[:_MOST_RANKS]
    pairs = {rank.rank: _pairs(rank, first.root, batches) for rank in asked}
    whole = all(batch in pairs.get(rank, ()) for rank in ranks[:_MOST_RANKS] for batch in batches)
    for batch in batches:
        seen = {rank: _jumps(*of_rank[batch]) for rank, of_rank in pairs.items() if batch in of_rank}
        jumps = [(found / left, rank, key) for rank, of_rank in seen.items() for key, (left, found) in of_rank.items()]
        if jumps:
            _, largest_on, key = max(jumps)
            frames = pairs[largest_on][batch][1].frames
            cls = next((frame.cls for frame in frames if frame.module == key[0]), "")
            alike = sorted(rank for rank, of_rank in seen.items() if key in of_rank)
            name = f"{key[1]} of {module_text(key[0], cls)}"
            jump = WeightJump(name, batch, *seen[largest_on][key], alike, sorted(seen.keys() - set(alike)))
            return JumpSearch(jump, whole)
    return JumpSearch(None, whole)


def _pairs(rank: RankFacts, root: str, batches: range) -> dict[int, tuple[KeptPage, KeptPage]]:
    """Batch -> (the page before, its page), where no step in between can be missing."""
    pages = sorted((page for page in rank.pages.values() if page.root == root), key=lambda page: page.number)
    return {
        now.batch: (before, now)
        for before, now in pairwise(pages)
        if now.batch in batches and now.batch == before.batch + 1 and now.step - before.step in (0, 1)
        if before.complete and not before.lost_frames
    }


def _jumps(before: KeptPage, now: KeptPage) -> dict[tuple[str, str], tuple[float, float]]:
    """(module, role) -> (abs max as it was left, as it was found), of each weight that is larger by FACTOR."""
    left = dict(before.weights()) if now.step == before.step else {}
    for frame in before.frames:
        if frame.phase == FramePhase.OPTIMIZER:
            left.update({(frame.module, row.role): row for row in frame.weights if row.kind == RowKind.MEASURED})
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for key, row in now.weights().items():
        known = left.get(key)
        if known is not None and (known.shape, known.dtype) == (row.shape, row.dtype):
            was, is_now = _size(known), _size(row)
            if was > 0 and is_now >= FACTOR * was:
                found[key] = was, is_now
    return found


def _size(row: Row) -> float:
    return row.abs_max if row.finite and row.abs_max is not None else 0.0
