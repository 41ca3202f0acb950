"""Two batches, row by row, in the order of the first one's calls. Pure: frames in, differences out.

A row is one tensor of one call of a module. Its counterpart has the same module, phase and role, and belongs to the
same call of the module: the second call is compared with the second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from ...core.errors import UsageError
from ...core.frames import Frame, FramePhase, Row, RowContent
from ...core.recorder.page_tables import whole
from ...core.text import numbers_text
from ..decide.decide import decide
from ..facts.facts import RankFacts, RunFacts
from ..facts.kept_pages import KeptPage

What = Literal["numbers", "non-finite", "shape", "dtype", "only in A", "only in B"]


class RowDifference(msgspec.Struct, frozen=True):
    """One tensor that is not the same on both sides."""

    module: str
    cls: str = msgspec.field(name="class")
    phase: FramePhase
    role: str
    call: int
    """Which call of the module it is, from 0."""
    what: What
    a: Row | None
    b: Row | None
    factor: float | None = None
    """The larger abs max over the smaller one, 1 and above. null: infinite, or not two finite numbers."""

    def exceeds(self, factor: float) -> bool:
        """Whether it is more than a difference of numbers by at most so much."""
        return self.what != "numbers" or self.factor is None or self.factor > factor


class BatchDifference(msgspec.Struct, frozen=True):
    """What two batches have and have not in common."""

    compared: int
    """Tensors that both sides have measured."""
    before: int
    """Tensors in front of the first difference: they are the same on both sides."""
    rows: list[RowDifference]
    """In the order of A; what only B has comes last."""

    def first(self, factor: float = 1.0) -> RowDifference | None:
        """The first one that exceeds a factor between the two abs max."""
        return next((row for row in self.rows if row.exceeds(factor)), None)


class _TensorKey(msgspec.Struct, frozen=True):
    module: str
    cls: str
    phase: FramePhase
    role: str
    call: int


def difference(a: Iterable[Frame], b: Iterable[Frame]) -> BatchDifference:
    """Compare the frames of two batches. Rows without numbers on both sides (`None`, an int) are left out."""
    theirs = dict(_rows(b))
    compared = same = 0
    found: list[RowDifference] = []
    for place, row in _rows(a):
        other = theirs.pop(place, None)
        compared += other is not None and row.kind == other.kind == RowContent.MEASURED
        differing = _compare(place, row, other)
        if differing is not None:
            found.append(differing)
        elif not found:
            same += 1
    found += [_found(place, "only in B", None, row) for place, row in theirs.items()]
    return BatchDifference(compared, same, found)


def _rows(frames: Iterable[Frame]) -> Iterator[tuple[_TensorKey, Row]]:
    """Gradients come one by one, in another order on each rank: so each role of a module is counted by itself."""
    calls: Counter[tuple[str, str, str]] = Counter()
    for frame in sorted(frames, key=lambda frame: frame.index):
        for row in frame.rows:
            counted = frame.module, frame.phase, row.role
            call = calls[counted]
            calls[counted] += 1
            if row.kind not in (RowContent.NOT_A_TENSOR, RowContent.NONE):
                yield _TensorKey(frame.module, frame.cls, frame.phase, row.role, call), row


def _compare(place: _TensorKey, a: Row, b: Row | None) -> RowDifference | None:
    if b is None:
        return _found(place, "only in A", a, None)
    if a.shape != b.shape:
        return _found(place, "shape", a, b)
    if a.dtype != b.dtype:
        return _found(place, "dtype", a, b)
    if a.kind != b.kind:
        return _found(place, "only in A" if a.kind == RowContent.MEASURED else "only in B", a, b)
    if a.flags != b.flags:
        return _found(place, "non-finite", a, b)
    if any(map(_differ, (a.abs_max, a.abs_min, a.zeros), (b.abs_max, b.abs_min, b.zeros))):
        return _found(place, "numbers", a, b)
    return None


def _differ(a: float | None, b: float | None) -> bool:
    """nan is what nan is."""
    return a != b and not (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def _found(place: _TensorKey, what: What, a: Row | None, b: Row | None) -> RowDifference:
    return RowDifference(place.module, place.cls, place.phase, place.role, place.call, what, a, b, _factor(a, b))


def _factor(a: Row | None, b: Row | None) -> float | None:
    if a is None or b is None or not (a.finite and b.finite) or a.abs_max is None or b.abs_max is None:
        return 1.0 if a is not None and b is not None and a.flags == b.flags else None
    low, high = sorted((a.abs_max, b.abs_max))
    if low == high:
        return 1.0
    found = high / low if low else math.inf
    return found if math.isfinite(found) else None


# The two batches that are compared: chosen among what the stores hold.


class DiffSide(msgspec.Struct, frozen=True):
    """One of the two batches."""

    run: str
    rank: int
    attempt: int
    root: str
    batch: int
    step: int
    complete: bool
    """Nothing of it was overwritten or cut off before it was read."""


class SideSelection(NamedTuple):
    """Both sides with their frames."""

    sides: tuple[DiffSide, DiffSide]
    frames: tuple[list[Frame], list[Frame]]


class SideRequest(NamedTuple):
    """What a user asks for on one side; None is not said."""

    run: str
    facts: RunFacts
    rank: int | None
    batch: int | None


def choose(a: SideRequest, b: SideRequest) -> SideSelection:
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
    return SideSelection(
        (_side(a, ranks[0], first), _side(b, ranks[1], second)),
        ([whole(frame) for frame in first.frames], [whole(frame) for frame in second.frames]),
    )


def _either(wanted: int | None, other: int | None) -> int:
    found = wanted if wanted is not None else other
    assert found is not None
    return found


def _rank(wish: SideRequest, other: SideRequest | None) -> RankFacts:
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


def _pages(wish: SideRequest, rank: RankFacts) -> dict[int, list[KeptPage]]:
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


def _page(
    wish: SideRequest, rank: RankFacts, pages: dict[int, list[KeptPage]], batch: int, root: str | None
) -> KeptPage:
    if batch not in pages:
        raise UsageError(
            f"--batch: expected a batch of rank {rank.rank} that is in the store of run {wish.run} "
            f"({numbers_text(sorted(pages))}), found {batch}; more: gpuwatch launch --trace-batches N,N"
        )
    same = [page for page in pages[batch] if root is None or page.root == root]
    return max(same or pages[batch], key=lambda page: page.num_frames)


def _side(wish: SideRequest, rank: RankFacts, page: KeptPage) -> DiffSide:
    complete = page.complete and not page.lost_frames
    return DiffSide(wish.run, rank.rank, rank.attempt, page.root, page.batch, page.step, complete)
