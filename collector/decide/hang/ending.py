"""Whether the ranks of a job that stands still are ended for it now, and what the user is told of that. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....core.records import RankLook
from ....core.settings import OnHang
from ....core.text.ranks_text import ranks_text
from .hang_finding import HangFinding
from .standing import computes

PATIENCE_TIMES = 4.0
"""So many times the limit, where a job may come to its end by itself, though nothing says so."""
_NEARLY = 0.9
"""Ranks that stand still together have not begun to at the same moment."""


@dataclass(frozen=True)
class Ending:
    """What follows from a finding."""

    now: bool
    """The ranks are ended."""
    text: str
    """`ending the ranks`, or why they are not, and what to do to have them ended."""


def ending_of(found: HangFinding, looks: Sequence[RankLook], on_hang: OnHang, limit_s: float) -> Ending:
    """`limit_s` is the limit that the first rank has passed."""
    if on_hang == "report":
        return Ending(False, "the job is left as it is; to have it ended: --on-hang abort")
    return _abort(found, looks, limit_s) if on_hang == "abort" else _auto(found, looks, limit_s)


def _auto(found: HangFinding, looks: Sequence[RankLook], limit_s: float) -> Ending:
    """Only what cannot go on is ended."""
    outlook = found.outlook
    if outlook.kind == "may go on":
        who = ranks_text(outlook.free) if outlook.free else "a rank that was not seen"
        return Ending(
            False,
            f"the job is left as it is, as {who} may still go on; the timeouts of its process groups hold; to have it "
            "ended all the same: --on-hang abort",
        )
    if outlook.kind == "all wait" and not _have_rested(looks, PATIENCE_TIMES * limit_s):
        return Ending(False, f"if no rank moves, the job is ended after {PATIENCE_TIMES * limit_s:.0f} s")
    return _END


def _abort(found: HangFinding, looks: Sequence[RankLook], limit_s: float) -> Ending:
    """All is ended where the others wait for a rank; a rank that computes may come to its end."""
    if not found.may_end:
        return Ending(False, "the job is left as it is, as no rank is seen to wait for another")
    absent = {found.rank, *found.others}
    patience_s = PATIENCE_TIMES * limit_s
    working = [look for look in looks if look.where.rank in absent and computes(look)]
    early = [look for look in working if not _have_rested([look], patience_s)]
    if not early:
        return _END
    verb = "computes" if len(early) == 1 else "compute"
    who = ranks_text(sorted(look.where.rank for look in early))
    return Ending(False, f"the job is left as it is, as {who} {verb}; after {patience_s:.0f} s it is ended")


def _have_rested(looks: Sequence[RankLook], seconds: float) -> bool:
    return all(look.still_s >= _NEARLY * seconds for look in looks)


_END = Ending(True, "ending the ranks")
