"""Replicas: whether ranks run the same model, and whether one rank's copy of a weight differs from the others'.

Only pages of the same point are compared. The history of a weight that differs now gives the reason: it agreed in an
earlier batch (something changed it on one rank), it differed there too (ranks have weights of their own: experts,
adapters, other seeds), or no earlier batch was received.

    0.259 against 0.250, and 0.259 after its last step      the step: an expert that was trained on one rank alone
    1.7e38 against 0.5, and 0.5 after its last step         no step: memory, or code of the script's own
    1.7e38 against 0.5, gradients of at most 0.1            no step gives that number, whatever its learning rate
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...core.frames import Frame, FramePhase, Row, RowKind, module_text
from ...core.identity import is_rank
from .calls import FrameCalls, begun
from .diagnosis import LocalDiagnosis, number_text
from .kept_pages import KeptPage
from .rank_facts import RankFacts
from .run_facts import RunFacts

# The same point of a training on two ranks: which page of another rank may be compared with a page. Pure.
#
# Every rank numbers its own batches. Where rank 0 alone evaluates, its batch 33 is an earlier step than rank 1's:
#
# rank 0    batch 30: evaluation, step 20    batch 31: training, step 20
# rank 1                                     batch 20: training, step 20
#
# Batch 31 of rank 0 and batch 20 of rank 1 are the same point: both have the same root, the same optimizer step and the
# same number of collectives at the start of their first call, and both are training.


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


def peers_of(facts: RunFacts, page: KeptPage) -> dict[int, KeptPage]:
    """The pages of the other ranks that are the same point as this page. Looked for once."""
    key, rank = (page.attempt, page.rank, page.number), facts.one(page.attempt, page.rank)
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
    if mine is None or theirs is None or (mine.module, mine.phase) != (theirs.module, theirs.phase):
        return True
    return begun(mine) == begun(theirs) or min(begun(mine), begun(theirs)) < 0


def _is_training(rank: RankFacts, page: KeptPage) -> bool | None:
    """Whether a batch had a backward; None if its forward was not finished, or no backward of the rank was seen."""
    if page.has_backward:
        return True
    return False if page.complete and rank.pages.any_backward else None


def _are_apart(rank: RankFacts, other: RankFacts) -> bool:
    """Whether two ranks have ended in the same step and have counted different batches."""
    mine, theirs = (each.exit.where if each.exit is not None else each.state for each in (rank, other))
    return mine is not None and theirs is not None and mine.step == theirs.step and mine.batch != theirs.batch


WILD = 2.0**16
"""A weight larger by this factor than the other copies, and than 1, probably has a flipped exponent bit."""

_MOST_OF_STEP = 2.0**10
"""No known step moves a weight beyond this many times its gradient (or 1, if that is larger)."""

_MAX_PEERS = 8
"""How many other ranks a wild weight is compared with: replicas have the same weights."""


@dataclass(frozen=True)
class OddWeight:
    """A weight whose copy on one rank differs from the other copies, which agree."""

    place: str
    """`fc1` (Linear)"""
    row: Row
    others: Row
    ranks: list[int]
    """The ranks whose copies agree."""
    compared: int
    """Other weights that agree on all these ranks."""
    agreed_in: int | None = None
    """The last batch in which this rank's copy agreed with the others; None if no earlier batch was received."""
    changed: bool = False
    """On this rank alone, it is another one than its last step has left."""
    gradient: float | None = None
    """The largest gradient that it had in the batch before; None if that was not seen."""

    @property
    def certain(self) -> bool:
        """Whether this rank's copy is the odd one, and explains the non-finite value.

        With two copies, only an earlier batch in which they agreed shows which one is odd. A copy that differs a little
        may have been trained on this rank.
        """
        told_apart = len(self.ranks) > 1 or self.agreed_in is not None
        return told_apart and (self.wild or self.changed)

    @property
    def wild(self) -> bool:
        """Non-finite, or far larger than the others."""
        return not self.row.finite or _is_wild(self.row, self.others)

    @property
    def untrained(self) -> bool:
        """Whether no training can have made it: no step did, or no step that its gradient allows."""
        if self.changed or not self.wild:
            return self.changed
        if self.gradient is None:
            return False
        mine, theirs, step = self.row.abs_max, self.others.abs_max, _MOST_OF_STEP * max(self.gradient, 1.0)
        return not self.row.finite or (mine is not None and theirs is not None and mine > theirs + step)


def page_of(facts: RunFacts, diagnosis: LocalDiagnosis) -> KeptPage | None:
    """The page that a diagnosis is about, if it was received."""
    pages = facts.one(diagnosis.attempt, diagnosis.rank).pages.of_batch(diagnosis.batch)
    return next((page for page in pages if page.root == diagnosis.root), None)


def peers(facts: RunFacts, diagnosis: LocalDiagnosis) -> dict[int, KeptPage]:
    """The pages of the other ranks that are the same point as the diagnosis's page."""
    page = page_of(facts, diagnosis)
    return peers_of(facts, page) if page is not None else {}


def _earlier(facts: RunFacts, page: KeptPage) -> list[KeptPage]:
    """The pages of its root from before, latest first."""
    pages = facts.one(page.attempt, page.rank).pages.values()
    return sorted((p for p in pages if p.root == page.root and p.number < page.number), key=lambda p: -p.number)


def run_the_same_model(left: KeptPage | None, right: KeptPage | None) -> bool:
    """Whether two ranks call the same modules, as the ranks of DDP do and the stages of a pipeline do not."""
    if left is None or right is None or left.root != right.root:
        return False
    mine, theirs = left.modules(), right.modules()
    return bool(mine and theirs) and (mine <= theirs or theirs <= mine)


def odd_weight(facts: RunFacts, diagnosis: LocalDiagnosis, *, before: bool = False) -> OddWeight | None:
    """The weight of a diagnosis's module that differs on this rank alone, where the other weights agree.

    `before`: that of a module which was called before it in that forward, and whose output it may have been handed.

    None where ranks have weights of their own: they hand each other activations, or the weight differed in an earlier
    batch, too.
    """
    page, others = page_of(facts, diagnosis), peers(facts, diagnosis)
    if page is None or not others or any(_is_spread(each) for each in (page, *others.values())):
        return None
    mine, blamed = page.weights(), _called_before(page, diagnosis) if before else {diagnosis.module}
    # replicas with equal weights share one table: it is compared once
    theirs = list({id(weights): weights for weights in (other.weights() for other in others.values())}.values())
    odd: list[tuple[tuple[str, str], Row, Row]] = []
    agreeing = differing = 0
    for key, row in mine.items():
        copies = [weights[key] for weights in theirs if key in weights]
        if len(copies) < len(theirs):
            continue
        if all(_same(copy, row) for copy in copies):
            agreeing += 1
        elif key[0] in blamed and copies[0].finite and all(_same(copy, copies[0]) for copy in copies):
            odd.append((key, row, copies[0]))
        else:
            differing += 1
    tolerated = 0 if len(others) == 1 else (agreeing - 1) // 2
    if len(odd) != 1 or not agreeing or differing > tolerated:
        return None
    (key, row, copy), *_ = odd
    history = _history(facts, page, key)
    if history is not None and not history[1]:
        return None
    cls = next((frame.cls for frame in page.frames if frame.module == key[0]), "")
    found = OddWeight(module_text(key[0], cls), row, copy, sorted(others), agreeing, history and history[0])
    return _with_step(facts, page, key, found)


def _called_before(page: KeptPage, diagnosis: LocalDiagnosis) -> set[str]:
    calls = (frame for frame in page.frames if frame.phase == FramePhase.FORWARD)
    return {call.module for call in calls if call.index < diagnosis.row.frame} - {diagnosis.module}


def _with_step(facts: RunFacts, page: KeptPage, key: tuple[str, str], odd: OddWeight) -> OddWeight:
    """With what the batches before say of the last step, on this rank and on one of those that agree."""
    stepped, gradient = _last_step(facts, page, key)
    if stepped is None or _same(stepped, odd.row):
        return replace(odd, gradient=gradient)
    other = peers_of(facts, page)[odd.ranks[0]]
    theirs, _ = _last_step(facts, other, key)
    # what the script does with weights after every step, an average or a clamp, it does on all ranks
    return replace(odd, gradient=gradient, changed=theirs is None or _same(theirs, odd.others))


def _last_step(facts: RunFacts, page: KeptPage, key: tuple[str, str]) -> tuple[Row | None, float | None]:
    """(a weight after its step, its largest gradient) in the batch before a page, as far as those were read.

    If no step was made in between, the weight as that batch had it.
    """
    before = next(iter(_earlier(facts, page)), None)
    if before is None or before.step + 1 < page.step:
        return None, None
    module, role = key
    rows = [(frame, row) for frame in before.frames if frame.module == module for row in frame.rows]
    last = FramePhase.OPTIMIZER if before.step < page.step else FramePhase.FORWARD
    stepped = [row for frame, row in rows if frame.phase == last and row.role == role]
    gradients = [row for frame, row in rows if row.role == f"grad {role}" and row.kind == RowKind.MEASURED]
    sizes = [math.inf if row.abs_max is None or not row.finite else row.abs_max for row in gradients]
    return (stepped[-1] if stepped else None), max(sizes, default=None)


@dataclass(frozen=True)
class WildWeight:
    """A finite weight that is far larger than it was, or than it is on the other ranks."""

    frame: Frame
    row: Row
    against: str
    """What it is compared with: `5.00e-01 in batch 2`, `5.00e-01 on rank 0`."""

    @property
    def name(self) -> str:
        """`weight of `fc1` (Linear)`."""
        return f"{self.row.role} of {module_text(self.frame.module, self.frame.cls)}"


def wild_weight(facts: RunFacts, diagnosis: LocalDiagnosis) -> WildWeight | None:
    """The first wild weight of a diagnosis's page, up to the frame that shows the value; None if there is none.

    A weight that a flipped bit or the script made huge is finite. What overflows is a module further down.
    """
    page = page_of(facts, diagnosis)
    if page is None:
        return None
    past = next(iter(_earlier(facts, page)), None)
    known = [(f"in batch {past.batch}", past.weights())] if past is not None else []
    others = sorted(peers(facts, diagnosis).items())[:_MAX_PEERS]
    known += [(f"on rank {number}", other.weights()) for number, other in others]
    for frame in sorted(page.frames, key=lambda frame: frame.index):
        if frame.index > diagnosis.row.frame or frame.phase != FramePhase.FORWARD:
            continue
        for row in frame.weights:
            for where, weights in known:
                copy = weights.get((frame.module, row.role))
                if copy is not None and _is_wild(row, copy):
                    return WildWeight(frame, row, f"{number_text(copy.abs_max)} {where}")
    return None


def _is_wild(row: Row, copy: Row) -> bool:
    """Finite, and far larger than a finite copy. A weight that began at zero is not wild for having grown."""
    if not (row.finite and copy.finite) or row.abs_max is None or copy.abs_max is None:
        return False
    return row.abs_max > WILD * max(copy.abs_max, 1.0)


def _history(facts: RunFacts, page: KeptPage, key: tuple[str, str]) -> tuple[int, bool] | None:
    """(batch, whether all copies of a weight agreed) of the last earlier batch that can be compared; None if none."""
    for before in _earlier(facts, page):
        mine = before.weights().get(key)
        copies = [other.weights().get(key) for other in peers_of(facts, before).values()]
        known = [copy for copy in copies if copy is not None]
        if mine is not None and known:
            return before.batch, all(_same(copy, mine) for copy in known)
    return None


def _is_spread(page: KeptPage) -> bool:
    return page.calls_in_common(
        lambda: FrameCalls(frame for frame in page.frames if frame.phase == FramePhase.FORWARD).exchange
    )


def _same(left: Row, right: Row) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.flags == right.flags and (not left.finite or left.abs_max == right.abs_max)
