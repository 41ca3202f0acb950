"""Two batches, row by row, in the order of the first one's calls; and their difference as a terminal shows it.

A row is one tensor of one call of a module. Its counterpart has the same module, phase and role, and belongs to the
same call of the module: the second call is compared with the second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec
from rich.table import Column, Table
from rich.text import Text

from ...core.codes import Code
from ...core.errors import UsageError
from ...core.frames import Frame, FramePhase, Row, RowKind, format_number, module_text
from ...core.recorder.page_tables import whole
from ...core.text import numbers_text, shown_name
from ..decide.decide import decide
from ..facts.kept_pages import KeptPage
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..report.sentence_parts import TextConsole

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
        """Whether it is more than a difference of numbers by at most this factor."""
        return self.what != "numbers" or self.factor is None or self.factor > factor


class BatchDifference(msgspec.Struct, frozen=True):
    """The comparison of two batches."""

    compared: int
    """Number of tensors that both sides have measured."""
    before: int
    """Number of tensors before the first difference: they are the same on both sides."""
    rows: list[RowDifference]
    """In the order of A; rows of B alone are last."""

    def first(self, factor: float = 1.0) -> RowDifference | None:
        """The first one that exceeds a factor between the two abs max."""
        return next((row for row in self.rows if row.exceeds(factor)), None)


_TensorKey = tuple[str, str, FramePhase, str, int]
"""The first five fields of a RowDifference."""


def difference(a: Iterable[Frame], b: Iterable[Frame]) -> BatchDifference:
    """Compare the frames of two batches. Rows without numbers on both sides (`None`, an int) are left out."""
    theirs = dict(_rows(b))
    compared = same = 0
    found: list[RowDifference] = []
    for place, row in _rows(a):
        other = theirs.pop(place, None)
        compared += other is not None and row.kind == other.kind == RowKind.MEASURED
        what = _compare(row, other)
        if what is not None:
            found.append(RowDifference(*place, what, row, other, _factor(row, other)))
        elif not found:
            same += 1
    found += [RowDifference(*place, "only in B", None, row) for place, row in theirs.items()]
    return BatchDifference(compared, same, found)


def _rows(frames: Iterable[Frame]) -> Iterator[tuple[_TensorKey, Row]]:
    """Gradients come one by one, in another order on each rank: so each role of a module is counted by itself."""
    calls: Counter[tuple[str, str, str]] = Counter()
    for frame in sorted(frames, key=lambda frame: frame.index):
        for row in frame.rows:
            counted = frame.module, frame.phase, row.role
            call = calls[counted]
            calls[counted] += 1
            if row.kind not in (RowKind.NOT_A_TENSOR, RowKind.NONE):
                yield (frame.module, frame.cls, frame.phase, row.role, call), row


def _compare(a: Row, b: Row | None) -> What | None:
    if b is None:
        return "only in A"
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    if a.kind != b.kind:
        return "only in A" if a.kind == RowKind.MEASURED else "only in B"
    if a.flags != b.flags:
        return "non-finite"
    if any(map(_differ, (a.abs_max, a.abs_min, a.zeros), (b.abs_max, b.abs_min, b.zeros))):
        return "numbers"
    return None


def _differ(a: float | None, b: float | None) -> bool:
    """Whether two numbers differ; two nan do not."""
    return a != b and not (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def _factor(a: Row, b: Row | None) -> float | None:
    if b is None:
        return None
    if not (a.finite and b.finite) or a.abs_max is None or b.abs_max is None:
        return 1.0 if a.flags == b.flags else None
    low, high = sorted((a.abs_max, b.abs_max))
    if low == high:
        return 1.0
    found = high / low if low else math.inf
    return found if math.isfinite(found) else None


# The choice of the two batches among those in the stores.


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


class SideRequest(NamedTuple):
    """The user's choice for one side; None for options that were not given."""

    run: str
    facts: RunFacts
    rank: int | None
    batch: int | None


def choose(a: SideRequest, b: SideRequest) -> tuple[tuple[DiffSide, DiffSide], tuple[list[Frame], list[Frame]]]:
    """Both sides and their frames: of the batches that were asked for.

    Where none was, it is that of the verdict's overflow, else the last that both have. Raises UsageError when a rank
    or a batch is not there.
    """
    ranks = _rank(a, None), _rank(b, a)
    batches = _batches(a, ranks[0]), _batches(b, ranks[1])
    wanted = a.batch if a.batch is not None else b.batch
    other = b.batch if b.batch is not None else a.batch
    if wanted is None or other is None:
        wanted = other = _in_common(decide(a.facts).batch, batches)
    first = _page(a, ranks[0], wanted, None)
    second = _page(b, ranks[1], other, first.root)
    sides = _side(a, ranks[0], first), _side(b, ranks[1], second)
    return sides, ([whole(frame) for frame in first.frames], [whole(frame) for frame in second.frames])


def _rank(wish: SideRequest, other: SideRequest | None) -> RankFacts:
    there = wish.facts.of_attempt(wish.facts.last_attempt)
    wanted = _rank(other, None).rank if wish.rank is None and other is not None else wish.rank
    if wanted is None:
        verdict = decide(wish.facts)
        there = wish.facts.of_attempt(verdict.attempt) if verdict.attempt is not None else there
        wanted = verdict.rank if verdict.rank is not None else next((r.rank for r in there if r.pages), 0)
    found = next((rank for rank in there if rank.rank == wanted), None)
    if found is None:
        known = numbers_text(rank.rank for rank in there)
        raise UsageError(Code.NOT_IN_RUN, f"--rank: expected a rank of run {wish.run} ({known}), found {wanted}")
    return found


def _batches(wish: SideRequest, rank: RankFacts) -> set[int]:
    if not rank.pages:
        raise UsageError(
            Code.NOT_IN_RUN,
            f"expected batches of rank {rank.rank} in the store of run {wish.run}, found none; a run keeps that of an "
            "overflow, the one before it and the last of each rank; to keep more: gpuwatch launch --trace-batches N,N",
        )
    return {page.batch for page in rank.pages.values()}


def _in_common(of_verdict: int | None, batches: tuple[set[int], set[int]]) -> int:
    both = batches[0] & batches[1]
    if not both:
        has = " and ".join(f"{numbers_text(side)} ({name})" for name, side in zip("AB", batches, strict=True))
        raise UsageError(
            Code.NOT_IN_RUN, f"--batch: expected a batch that both sides have, found {has}; choose with --batch N,N"
        )
    return of_verdict if of_verdict is not None and of_verdict in both else max(both)


def _page(wish: SideRequest, rank: RankFacts, batch: int, root: str | None) -> KeptPage:
    pages = rank.pages.of_batch(batch)
    if not pages:
        wanted = f"a batch of rank {rank.rank} that is in the store of run {wish.run}"
        known, more = numbers_text(_batches(wish, rank)), f"to keep it: gpuwatch launch --trace-batches {batch}"
        raise UsageError(Code.NOT_IN_RUN, f"--batch: expected {wanted} ({known}), found {batch}; {more}")
    same = [page for page in pages if root is None or page.root == root]
    return max(same or pages, key=lambda page: page.num_frames)


def _side(wish: SideRequest, rank: RankFacts, page: KeptPage) -> DiffSide:
    complete = page.complete and not page.lost_frames
    return DiffSide(wish.run, rank.rank, rank.attempt, page.root, page.batch, page.step, complete)


# The text: both sides, the first difference, then a table of what differs.

MOST_ROWS = 40
_BY = "by abs max, abs min and zeros"
"""What is known of two tensors that do not differ. Their elements may."""
_SAID = {
    "shape": "its shape is {a} in A and {b} in B",
    "dtype": "its dtype is {a} in A and {b} in B",
    "only in A": "it was measured in A alone",
    "only in B": "it was measured in B alone",
}


def render_difference(
    sides: tuple[DiffSide, DiffSide],
    found: BatchDifference,
    *,
    factor: float,
    width: int = 110,
    color: bool = False,
    every_row: bool = False,
) -> str:
    """The whole text, `width` characters wide. `factor`: what counts as a large difference between two abs max."""
    console = TextConsole(width, color=color)
    first, large = found.first(), found.first(factor)
    lines = [*(Text(f"{name}  {_side_text(side)}") for name, side in zip("AB", sides, strict=True)), Text("")]
    if first is None:
        alike = f"SAME  All {found.compared} tensors are the same {_BY}."
        console.print(*lines, Text(alike, "bold green"), sep="\n")
        return console.text()
    lines.append(Text(f"DIFFERENT  The first difference is {_sentence(first)}.", "bold yellow"))
    before = f"The {found.before} tensors before it are the same {_BY}."
    if found.before < 2:
        before = f"The tensor before it is the same {_BY}." if found.before else "It is the first tensor of all."
    lines.append(Text(f"  {before}"))
    if large is None:
        lines.append(Text(f"  No abs max differs by more than a factor of {factor:g}."))
    elif large is not first:
        lines.append(Text(f"  The first one by more than a factor of {factor:g} is {_sentence(large)}."))
    rows = found.rows if every_row else found.rows[:MOST_ROWS]
    console.print(*lines, Text(""), _table(rows), sep="\n")
    if len(rows) < len(found.rows):
        console.print(Text(f"and {len(found.rows) - len(rows)} more: --all"))
    return console.text()


def _side_text(side: DiffSide) -> str:
    attempt = f", attempt {side.attempt}" if side.attempt else ""
    who = f"run {shown_name(side.run)}, rank {side.rank}{attempt}, {shown_name(side.root)}"
    return f"{who}, batch {side.batch}, step {side.step}{'' if side.complete else ' (a part of it)'}"


def _sentence(row: RowDifference) -> str:
    call = f", call {row.call + 1}" if row.call else ""
    where = f"{shown_name(row.role)} of {module_text(row.module, row.cls)}, {row.phase}{call}"
    if row.what in _SAID:
        return f"{where}: {_SAID[row.what].format(a=_of(row.a, row.what), b=_of(row.b, row.what))}"
    if row.factor == 1:
        return f"{where}: abs max is {_number(row.a)} on both, but abs min or the zeros are not the same"
    a, b = _number(row.a), _number(row.b)
    if a == b and row.a is not None and row.b is not None:
        a, b = f"{row.a.abs_max:.9g}", f"{row.b.abs_max:.9g}"
    return f"{where}: abs max is {a} in A and {b} in B"


def _of(row: Row | None, what: str) -> str:
    if row is None:
        return "-"
    return str(row.dtype if what == "dtype" else tuple(row.shape) if row.shape is not None else "unknown")


def _number(row: Row | None) -> str:
    if row is None or row.kind != RowKind.MEASURED:
        return "-"
    if row.flags:
        return "nan" if row.nan else "inf"
    return format_number(row.abs_max).strip()


def _table(rows: list[RowDifference]) -> Table:
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("A abs max", "B abs max", "factor"))
    table = Table(
        Column("module", overflow="fold"), Column("tensor", overflow="fold"), *numbers, box=None, pad_edge=False
    )
    for row in rows:
        name = f"{shown_name(row.module) or '(root)'} {shown_name(row.cls)}"
        phase = "" if row.phase == FramePhase.FORWARD else f" ({row.phase})"
        cells = [f"{name}{phase}", shown_name(row.role), _number(row.a), _number(row.b), _factor_text(row)]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _factor_text(row: RowDifference) -> str:
    if row.what not in ("numbers", "non-finite"):
        return row.what
    if row.factor is None:
        return row.what if row.what == "non-finite" else "inf"
    if row.factor == 1:
        return "same abs max"
    return f"{row.factor:.3g}" if row.factor >= 1.01 else f"1 + {row.factor - 1:.1e}"
