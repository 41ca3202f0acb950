"""Where the ranks of an attempt stood at its end: what their main threads did, and how far they had got. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ...core.events.agent_events import RankLook
from ...core.events.rank_standing import StackLine
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from .hang_finding import find_hang
from .hang_model import HangFinding

_TRACE_LINE = re.compile(
    r'^ *File "(?P<file>[^"\n]*)", line (?P<line>\d+), in (?P<function>[^\n]+)(?:\n {4,}(?P<text>[^\n]*))?',
    re.MULTILINE,
)


def last_look(rank: RankFacts) -> RankLook | None:
    """Where a rank stood at its end, as if it had been asked then; None if that is not known.

    A fatal signal leaves the stacks (faulthandler), an exception its traceback, and a rank that torchrun stops is asked
    before (launcher/agent/last_looks.py).
    """
    exit_, error = rank.exit, rank.error
    if exit_ is None:
        return None
    stack, state, busy, phase = exit_.main, exit_.state, exit_.busy, exit_.phase
    interrupted = error is not None and error.error == "KeyboardInterrupt"
    if interrupted:  # where it was, and no end of its own
        phase = "script"
    if error is not None and not (interrupted and stack):
        stack, state, busy = calls_of(error.traceback), "S", 0.0
    elif exit_.by == "itself":
        stack, state, busy = [line for line in stack or exit_.stack if line.line], "S", 0.0
    where, groups = exit_.where, exit_.groups
    place = exit_.module, exit_.cls
    return RankLook(where, 0, exit_.still_s, phase, *place, state, busy, stack, groups, after=exit_.after)


def looks_of(ranks: Iterable[RankFacts]) -> dict[int, RankLook]:
    """Rank -> where it stood at its end, of those of which that is known."""
    return {rank.rank: look for rank in ranks if (look := last_look(rank)) is not None}


def calls_of(traceback: str) -> list[StackLine]:
    """The calls in the text of a traceback, the innermost first."""
    found = [
        StackLine(match["file"], int(match["line"]), match["function"], (match["text"] or "").strip())
        for match in _TRACE_LINE.finditer(traceback)
    ]
    return found[::-1]


def outlasted_its_group(rank: RankFacts) -> bool:
    """Whether a signal ended a rank that had waited in a group for longer than that lets it wait.

    NCCL's watchdog then aborts the communicator and the process. What that does to threads of the library may come
    first: the signal is SIGABRT or another one, and says nothing of why the others did not come.
    """
    exit_ = rank.exit
    if exit_ is None or not rank.was_killed:
        return False
    waits = ("issuing", "waiting", "issued", "on_device")
    return any(0 < group.timeout_s <= group.since_s for group in exit_.groups if group.phase in waits)


STILL_S = 10.0
"""A job whose waiting ranks have rested for less when a signal came may have gone on."""


def stood_still(facts: RunFacts) -> HangFinding | None:
    """What the ranks waited for when a signal ended their job; None if they had moved lately, or it does not show."""
    ranks = facts.of_attempt(facts.last_attempt)
    looks = [look for look in looks_of(ranks).values() if look.stack]
    asked = {rank.rank for rank in ranks if rank.exit is not None and rank.exit.main}  # a Ctrl-C has moved others
    still_s = min((look.still_s for look in looks if look.where.rank in asked), default=0.0)
    if len(looks) < max(2, len(ranks), facts.announced_ranks) or still_s < STILL_S:
        return None
    found = find_hang(looks, {}, len(looks), over=True)
    if found is None or not found.ranks:
        return None
    statement = f"It had stood still for {still_s:.0f} s. {found.statement}"
    return replace(found, statement=statement)
