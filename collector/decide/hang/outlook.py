"""Whether a job that stands still can go on by itself. Pure.

A rank that stands in code of its own may work there: it downloads, asks a licence server, waits for a file system or
for somebody who types, or its child processes compute. From outside that looks like a rank that never comes. So a job
is stuck for certain only if no rank stands in code of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ....core.records import RankLook
from .hang_finding import HangFinding, Outlook
from .meetings import standing_at
from .standing import BACKWARD, QUIET, Standing

_NEVER_COMES = frozenset({"did not come", "left early", "mismatch"})
"""What the ranks wait for never comes, if all of them wait. In a circle of groups it may: from another thread, such as
a checkpoint writer's."""


def outlook_of(found: HangFinding, standings: Sequence[Standing], looks: Sequence[RankLook], unseen: int) -> Outlook:
    """`standings` and `looks` are of the same ranks in the same order; of `unseen` ranks nothing is known."""
    bound = [_bound(standing, look) for standing, look in zip(standings, looks, strict=True)]
    free = [standing.rank for standing, how in zip(standings, bound, strict=True) if how == "free"]
    if free or unseen > 0:
        return Outlook("may go on", free)
    stopped = any(standing.kind == "stopped" for standing in standings)
    if all(how == "shown" for how in bound) and (stopped or found.cause in _NEVER_COMES):
        return Outlook("cannot go on")
    return Outlook("all wait")


def _bound(standing: Standing, look: RankLook) -> Literal["shown", "seems", "free"]:
    """Whether a rank waits for others: shown by its own table, as its stack looks, or not."""
    if standing.kind == "stopped":
        return "shown" if look.state == "T" else "free"  # t: a debugger looks at it
    if look.phase == "raised":
        return "seems"  # it does not come back; what it does while it leaves, such as an upload, may take a while
    if look.busy >= QUIET:
        return "free"
    placed = standing_at(look.groups) is not None
    if standing.kind == "waits" and placed:
        return "shown"
    if standing.kind == "unknown" and placed:
        return "seems"
    # a `wait` that its table does not show is of something else, or of its device
    if (standing.kind == "waits" and standing.operation != "wait") or standing.operation == BACKWARD:
        return "seems"
    return "free"
