"""Which bad row of a call to follow, and whether an -inf in it is nothing new. Pure.

Masks are made of -inf: such a row is followed only where it explains what the call has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...core.frames import Frame, Page, Row
from .diagnosis import rows_in


def worst(rows: list[Row]) -> Row | None:
    """The first bad row that is more than -inf; else the first that is -inf, and None if all are finite."""
    bad = [row for row in rows if not row.finite]
    return next((row for row in bad if not row.only_neginf), bad[0] if bad else None)


def bad_input_of(frame: Frame, bad_output: Row | None) -> Row | None:
    """The input to follow: the worst one. A mask of -inf is followed only if it explains the output."""
    bad = worst(frame.inputs)
    if bad is None or not bad.only_neginf:
        return bad
    return bad if bad_output is None or bad_output.nan or bad_output.only_neginf else None


class EarlierRow(NamedTuple):
    """What an earlier batch says of a row."""

    batch: int
    seen: bool
    """It held -inf there."""


def neginf_before(earlier: Sequence[Page], frame: Frame, role: str) -> EarlierRow | None:
    """Whether a row of the same module held -inf in an earlier batch. `earlier` are pages, latest first.

    None if no earlier batch has that row.
    """
    absent: EarlierRow | None = None
    for page in earlier:
        rows = rows_in(page.frames, frame.phase, frame, role)
        if any(row.only_neginf for row in rows):
            return EarlierRow(page.batch, True)
        if rows and absent is None:
            absent = EarlierRow(page.batch, False)
    return absent
