"""The same batch on several ranks: do they run the same model, and is one rank's copy of a weight another one?"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.frames import Page, Row
from ..diagnose.calls import Calls
from ..diagnose.local_diagnosis import LocalDiagnosis
from ..facts import RankFacts, RunFacts

WILD = 2.0**16
"""A copy of a weight that is so many times larger than the others is one whose exponent has changed."""


@dataclass(frozen=True)
class OddWeight:
    """A weight that one rank alone has otherwise."""

    row: Row
    others: Row
    ranks: list[int]
    """The ranks whose copies agree."""
    compared: int
    """Other weights that agree on all these ranks."""

    @property
    def certain(self) -> bool:
        """More than a small difference that nobody else can confirm."""
        return len(self.ranks) > 1 or self.wild

    @property
    def wild(self) -> bool:
        """Non-finite, or far larger than the others."""
        mine, theirs = self.row.abs_max, self.others.abs_max
        return not self.row.finite or (mine is not None and theirs is not None and mine > theirs * WILD)


def page_of_batch(rank: RankFacts, root: str, batch: int) -> Page | None:
    """The page of one batch of one root, if it was received."""
    return next((p for p in rank.pages.values() if p.batch == batch and p.root == root), None)


def page_of(facts: RunFacts, diagnosis: LocalDiagnosis) -> Page | None:
    """The page that a diagnosis is about."""
    return page_of_batch(facts.ranks[diagnosis.attempt, diagnosis.rank], diagnosis.root, diagnosis.batch)


def peers(facts: RunFacts, diagnosis: LocalDiagnosis) -> dict[int, Page]:
    """The pages of the same batch on the other ranks."""
    found = {
        rank.rank: page_of_batch(rank, diagnosis.root, diagnosis.batch)
        for rank in facts.of_attempt(diagnosis.attempt)
        if rank.rank != diagnosis.rank
    }
    return {number: page for number, page in found.items() if page is not None}


def run_the_same_model(left: Page | None, right: Page | None) -> bool:
    """Whether two ranks call the same modules, as the ranks of DDP do and the stages of a pipeline do not."""
    if left is None or right is None or left.root != right.root:
        return False
    mine, theirs = _modules(left), _modules(right)
    return bool(mine and theirs) and (mine <= theirs or theirs <= mine)


def _modules(page: Page) -> set[tuple[str, str]]:
    return {(frame.module, frame.cls) for frame in page.frames if frame.phase == "forward" and frame.module}


def odd_weight(facts: RunFacts, diagnosis: LocalDiagnosis) -> OddWeight | None:
    """The weight of a diagnosis's module that this rank alone has otherwise, where the other weights agree.

    None where ranks have weights of their own, as they do where they hand each other activations.
    """
    page, others = page_of(facts, diagnosis), peers(facts, diagnosis)
    if page is None or not others or any(_is_spread(each) for each in (page, *others.values())):
        return None
    mine = _weights(page)
    theirs = [_weights(other) for other in others.values()]
    odd: list[tuple[Row, Row]] = []
    agreeing = differing = 0
    for key, row in mine.items():
        copies = [weights[key] for weights in theirs if key in weights]
        if len(copies) < len(theirs):
            continue
        if all(_same(copy, row) for copy in copies):
            agreeing += 1
        elif key[0] == diagnosis.module and copies[0].finite and all(_same(copy, copies[0]) for copy in copies):
            odd.append((row, copies[0]))
        else:
            differing += 1
    tolerated = 0 if len(others) == 1 else (agreeing - 1) // 2
    if len(odd) != 1 or not agreeing or differing > tolerated:
        return None
    return OddWeight(*odd[0], sorted(others), agreeing)


def _is_spread(page: Page) -> bool:
    return Calls(frame for frame in page.frames if frame.phase == "forward").exchange


def _weights(page: Page) -> dict[tuple[str, str], Row]:
    """As the first call of each module saw them."""
    found: dict[tuple[str, str], Row] = {}
    for frame in sorted(page.frames, key=lambda frame: frame.index):
        if frame.phase == "forward":
            for row in frame.weights:
                if row.kind == "measured":
                    found.setdefault((frame.module, row.role), row)
    return found


def _same(left: Row, right: Row) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.flags == right.flags and (not left.finite or left.abs_max == right.abs_max)
