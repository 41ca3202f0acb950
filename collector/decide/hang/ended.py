"""The verdict of a job that ended because its ranks did not meet, before it was seen to stand still.

A group's timeout raises on those that came, gloo aborts a rank that is sent another size than it expects, and a rank
that leaves takes the connection from those that wait for it. None of these names who was at fault; the ranks' tables
of their process groups can.
"""

from __future__ import annotations

import signal

from ....core.text.ranks_text import ranks_text
from ...facts.facts import RankFacts, RunFacts
from ..verdict_model import Verdict
from ..words import doing, first_line, hid_a_peer_failure, own_error, was_aborted, was_aborted_at_exit
from .by_groups import Shown, find_by_groups
from .finding import did_not_come
from .hang_finding import HangFinding
from .meetings import standing_at
from .standing import BACKWARD, Standing
from .verdict import verdict_of

_IN_BACKWARD = "in _engine_run_backward"
"""In the traceback of what a backward raised."""
_TIMED_OUT = ("imed out", "imeout", "failed to pass monitoredBarrier")


def ended_verdict(facts: RunFacts) -> Verdict | None:
    """None if a rank ended for a reason of its own, if a signal ended the job, or if the tables lead to no rank."""
    nodes = facts.nodes.values()
    if any(node.signal is not None for node in nodes) or all(
        node.bye is None or node.bye.outcome == "ok" for node in nodes
    ):
        return None
    ranks = facts.of_attempt(facts.last_attempt)
    shown = {}
    reducing = _in_reduction(ranks)
    for rank in ranks:
        one = _shown(rank, rank.rank in reducing)
        if one is None:
            return None
        shown[rank.rank] = one
    messages = [error.message for rank in ranks if (error := own_error(rank)) is not None]
    timed_out = any(words in message for message in messages for words in _TIMED_OUT)
    hidden = [rank for rank in ranks if hid_a_peer_failure(rank)]
    if not messages and not hidden and not any(was_aborted(rank) for rank in ranks):
        return None
    waited = "waited until the group's timeout" if timed_out else "waited"
    world_size = max((len(ranks), *(_world_size(rank) for rank in ranks)))
    found = find_by_groups(shown, world_size, waited)
    if found is None and timed_out and len(shown) == world_size:
        found = _missed_the_reduction(sorted(reducing), shown, waited)
    if found is None or (found.cause not in ("mismatch", "left early") and not timed_out):
        return None
    found.evidence.extend(
        f"rank {rank.rank} raised {error.error}: {first_line(error.message)}"
        for rank in ranks
        if (error := own_error(rank)) is not None
    )
    found.evidence.extend(
        f"rank {rank.rank} left with an exit code after a collective had raised in it" for rank in hidden
    )
    found.evidence.extend(f"rank {rank.rank} was aborted by SIGABRT" for rank in ranks if was_aborted(rank))
    return verdict_of(facts, found, ranks, {}, "hang" if timed_out else "crash")


def _missed_the_reduction(waiting: list[int], shown: dict[int, Shown], waited: str) -> HangFinding | None:
    """Some waited in a backward's reduction, which no table describes, and others were elsewhere and behind."""
    away = [rank for rank, one in shown.items() if one.kind == "away"]
    if not waiting or not away or len(waiting) + len(away) < len(shown) or not _are_behind(away, waiting, shown):
        return None
    standings = {
        rank: Standing(
            rank, "may wait" if rank in waiting else "own", BACKWARD if rank in waiting else "", "", one.what
        )
        for rank, one in shown.items()
    }
    evidence = [f"{ranks_text([rank])} was {shown[rank].what}" for rank in away] + _counts(shown)
    return did_not_come(
        [standings[rank] for rank in away], [standings[rank] for rank in waiting], waited, 0, evidence, stacks=False
    )


def _are_behind(away: list[int], waiting: list[int], shown: dict[int, Shown]) -> bool:
    """Whether each of these has begun fewer collectives of a group than one that waits, as far as their tables show."""
    begun = {rank: {(g.name, g.members): g.begun for g in one.groups} for rank, one in shown.items()}
    most: dict[tuple[str, str], int] = {}
    for rank in waiting:
        for group, number in begun[rank].items():
            most[group] = max(number, most.get(group, 0))
    return all(any(number < most.get(group, 0) for group, number in begun[rank].items()) for rank in away)


def _counts(shown: dict[int, Shown]) -> list[str]:
    """`collectives begun in group 0: 9 by ranks 0, 2; 8 by rank 1`"""
    found: dict[str, dict[int, list[int]]] = {}
    for rank, one in sorted(shown.items()):
        for group in one.groups:
            found.setdefault(group.name, {}).setdefault(group.begun, []).append(rank)
    return [
        f"collectives begun in group {name}: "
        + "; ".join(f"{number} by {ranks_text(ranks)}" for number, ranks in sorted(by_number.items(), reverse=True))
        for name, by_number in found.items()
        if len(by_number) > 1
    ]


def _in_reduction(ranks: list[RankFacts]) -> set[int]:
    """The ranks that waited in a backward for the gradients of others: they raised there, or were ended in a backward
    in which another one has raised. Without one that has raised there, a backward may be all computation."""
    raised = {
        rank.rank
        for rank in ranks
        if (error := own_error(rank)) is not None and error.peer_failure and _IN_BACKWARD in error.traceback
    }
    ended = {rank.rank for rank in ranks if own_error(rank) is None and _was_in_backward(rank)}
    return raised | ended if raised else set()


def _was_in_backward(rank: RankFacts) -> bool:
    return rank.exit is not None and (rank.exit.by, rank.exit.phase) == ("torchrun", "backward")


def _shown(rank: RankFacts, reduces: bool) -> Shown | None:
    """None for a rank that ended for a reason of its own, or whose end is not known."""
    exit_, error = rank.exit, own_error(rank)
    if exit_ is None or exit_.code is None:
        return None
    if error is not None and not error.peer_failure:
        return None
    if error is not None or hid_a_peer_failure(rank):
        placed = standing_at(exit_.groups, failed=True) is not None
        what = f"in {BACKWARD}" if reduces else doing(exit_)
        return Shown(exit_.groups, "waits" if placed else "may wait", what, failed=True)
    if exit_.by == "itself" and (exit_.code == 0 or was_aborted_at_exit(rank)):
        return Shown(exit_.groups, "left")
    placed = standing_at(exit_.groups) is not None
    if exit_.by == "itself" and not (exit_.code == -signal.SIGABRT and placed):
        return None
    if not placed and reduces:
        return Shown(exit_.groups, "may wait", f"in {BACKWARD}")
    return Shown(exit_.groups, "waits" if placed else "away", doing(exit_))


def _world_size(rank: RankFacts) -> int:
    return rank.state.world_size if rank.state is not None else 0
