"""An insight: report.json's `insights`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ....core.text.ranks_text import ranks_text


class Insight(msgspec.Struct, frozen=True):
    """One finding over ranks, modules and batches. It is no verdict: nothing of it has to be wrong."""

    kind: str
    """no_scaler, scaler_collapsing, scaler_too_small, growth, near_overflow, underflow, dead_module, replica_drift,
    rank_unlike; unknown: one of them could not be told"""
    text: str
    """One sentence without its full stop."""
    next: str
    """The mend, as a sentence."""
    ranks: list[int]
    modules: list[str]
    since: int | None = None
    """The first batch in which it was seen."""


def where_text(ranks: Iterable[int], all_ranks: Sequence[int]) -> str:
    """`on all 8 ranks`, `on rank 3`.

    >>> where_text([0, 1], [0, 1]), where_text([3], [0, 1, 2, 3]), where_text([0], [0])
    ('on both ranks', 'on rank 3', 'on rank 0')
    """
    found = sorted(set(ranks))
    if len(found) > 1 and len(found) == len(set(all_ranks)):
        return "on both ranks" if len(found) == 2 else f"on all {len(found)} ranks"
    return f"on {ranks_text(found)}"


def modules_text(modules: Sequence[str]) -> str:
    """`41 modules`; a few by their names.

    >>> modules_text(["fc1"]), modules_text(["fc1", ""]), modules_text(["a", "b", "c", "d"])
    ('`fc1`', '`fc1` and the root', '4 modules (`a`, `b`, ...)')
    """
    names = [f"`{module}`" if module else "the root" for module in modules]
    if len(names) <= 2:
        return " and ".join(names)
    return f"{len(names)} modules ({names[0]}, {names[1]}, ...)"
