"""The first tensor of a batch that is far larger on the rank of a diagnosis than on the other ranks. Pure."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ...core.frames import Frame, FramePhase, RowKind, module_text
from ...core.roles import RoleKind
from ..facts.diagnosis import LocalDiagnosis, number_text
from ..facts.replicas import page_of, peers, run_the_same_model
from ..facts.run_facts import RunFacts

_LARGER = 10.0
"""Ranks have data of their own: a smaller factor is ordinary."""
_MOST_RANKS = 8
_ROLES = (RoleKind.INPUT, RoleKind.OUTPUT)
_Sizes = dict[tuple[str, str, str, int], float]
"""(module, class, role, number of the call) -> abs max"""


class UnlikeTensor(NamedTuple):
    """abs max of one tensor here, and the largest on the other ranks."""

    role: str
    module: str
    cls: str
    size: float
    others: float
    ranks: int
    """How many other ranks were compared."""

    @property
    def line(self) -> str:
        """A line of evidence."""
        theirs = f"at most {number_text(self.others)} on {self.ranks} other rank{'s' if self.ranks > 1 else ''}"
        place = module_text(self.module, self.cls)
        return f"first tensor out of line: {self.role} of {place}, abs max {number_text(self.size)} against {theirs}"


def unlike_tensor(facts: RunFacts, first: LocalDiagnosis) -> UnlikeTensor | None:
    """In the order of the calls, up to the one that shows the value; None if there is none, or nothing to compare."""
    page = page_of(facts, first)
    if page is None or first.phase != FramePhase.FORWARD:
        return None
    same = [
        other
        for _, other in sorted(peers(facts, first).items())
        if other.batch == first.batch and run_the_same_model(page, other)
    ][:_MOST_RANKS]
    theirs = [_sizes(other.frames) for other in same]
    if not theirs:
        return None
    mine = _sizes([frame for frame in page.frames if frame.index <= first.row.frame])
    for key, size in mine.items():
        known = [sizes[key] for sizes in theirs if key in sizes]
        if len(known) == len(theirs) and size > _LARGER * max(known) > 0:
            module, cls, role, _ = key
            return UnlikeTensor(role, module, cls, size, max(known), len(known))
    return None


def _sizes(frames: list[Frame]) -> _Sizes:
    calls: Counter[str] = Counter()
    found: _Sizes = {}
    for frame in sorted(frames, key=lambda frame: frame.index):
        if frame.phase != FramePhase.FORWARD:
            continue
        calls[frame.module] += 1
        for row in frame.rows:
            if row.role_kind in _ROLES and row.kind == RowKind.MEASURED and row.finite and row.abs_max is not None:
                found[frame.module, frame.cls, row.role, calls[frame.module]] = row.abs_max
    return found
