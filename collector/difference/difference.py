"""Two batches, row by row, in the order of the first one's calls. Pure: frames in, differences out.

A row is one tensor of one call of a module. Its counterpart has the same module, phase and role, and belongs to the
same call of the module: the second call is compared with the second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from ...core.frames import Frame, Row

What = Literal["numbers", "non-finite", "shape", "dtype", "only in A", "only in B"]


class RowDifference(msgspec.Struct, frozen=True):
    """One tensor that is not the same on both sides."""

    module: str
    cls: str = msgspec.field(name="class")
    phase: str
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


class Difference(msgspec.Struct, frozen=True):
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


class _Place(msgspec.Struct, frozen=True):
    module: str
    cls: str
    phase: str
    role: str
    call: int


def difference(a: Iterable[Frame], b: Iterable[Frame]) -> Difference:
    """Compare the frames of two batches. Rows without numbers on both sides (`None`, an int) are left out."""
    theirs = dict(_rows(b))
    compared = same = 0
    found: list[RowDifference] = []
    for place, row in _rows(a):
        other = theirs.pop(place, None)
        compared += other is not None and row.kind == other.kind == "measured"
        differing = _compare(place, row, other)
        if differing is not None:
            found.append(differing)
        elif not found:
            same += 1
    found += [_found(place, "only in B", None, row) for place, row in theirs.items()]
    return Difference(compared, same, found)


def _rows(frames: Iterable[Frame]) -> Iterator[tuple[_Place, Row]]:
    """Gradients come one by one, in another order on each rank: so each role of a module is counted by itself."""
    calls: Counter[tuple[str, str, str]] = Counter()
    for frame in sorted(frames, key=lambda frame: frame.index):
        for row in frame.rows:
            counted = frame.module, frame.phase, row.role
            call = calls[counted]
            calls[counted] += 1
            if row.kind not in ("not_a_tensor", "none"):
                yield _Place(frame.module, frame.cls, frame.phase, row.role, call), row


def _compare(place: _Place, a: Row, b: Row | None) -> RowDifference | None:
    if b is None:
        return _found(place, "only in A", a, None)
    if a.shape != b.shape:
        return _found(place, "shape", a, b)
    if a.dtype != b.dtype:
        return _found(place, "dtype", a, b)
    if a.kind != b.kind:
        return _found(place, "only in A" if a.kind == "measured" else "only in B", a, b)
    if a.flags != b.flags:
        return _found(place, "non-finite", a, b)
    if any(map(_differ, (a.abs_max, a.abs_min, a.zeros), (b.abs_max, b.abs_min, b.zeros))):
        return _found(place, "numbers", a, b)
    return None


def _differ(a: float | None, b: float | None) -> bool:
    """nan is what nan is."""
    return a != b and not (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def _found(place: _Place, what: What, a: Row | None, b: Row | None) -> RowDifference:
    return RowDifference(place.module, place.cls, place.phase, place.role, place.call, what, a, b, _factor(a, b))


def _factor(a: Row | None, b: Row | None) -> float | None:
    if a is None or b is None or not (a.finite and b.finite) or a.abs_max is None or b.abs_max is None:
        return 1.0 if a is not None and b is not None and a.flags == b.flags else None
    low, high = sorted((a.abs_max, b.abs_max))
    if low == high:
        return 1.0
    found = high / low if low else math.inf
    return found if math.isfinite(found) else None
