"""The verdict of a job that ended because its ranks did not meet, before it was seen to stand still.

A group's timeout raises on those that came, gloo aborts a rank that is sent another size than it expects, and a rank
that leaves takes the connection from those that wait for it. None of these names who was at fault; the ranks' tables
of their process groups can.
"""

from __future__ import annotations

import signal

from ...facts.facts import RankFacts, RunFacts
from ..verdict_model import Verdict
from ..words import doing, first_line, hid_a_peer_failure, own_error, was_aborted, was_aborted_at_exit
from .by_groups import Shown, find_by_groups
from .meetings import standing_at
from .verdict import verdict_of

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
    for rank in ranks:
        one = _shown(rank)
        if one is None:
            return None
        shown[rank.rank] = one
    messages = [error.message for rank in ranks if (error := own_error(rank)) is not None]
    timed_out = any(words in message for message in messages for words in _TIMED_OUT)
    hidden = [rank for rank in ranks if hid_a_peer_failure(rank)]
    if not messages and not hidden and not any(was_aborted(rank) for rank in ranks):
        return None
    waited = "waited until the group's timeout" if timed_out else "waited"
    found = find_by_groups(shown, max((len(ranks), *(_world_size(rank) for rank in ranks))), waited)
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


def _shown(rank: RankFacts) -> Shown | None:
    """None for a rank that ended for a reason of its own, or whose end is not known."""
    exit_, error = rank.exit, own_error(rank)
    if exit_ is None or exit_.code is None:
        return None
    if error is not None and not error.peer_failure:
        return None
    if error is not None or hid_a_peer_failure(rank):
        placed = standing_at(exit_.groups, failed=True) is not None
        return Shown(exit_.groups, "waits" if placed else "may wait", doing(exit_), failed=True)
    if exit_.by == "itself" and (exit_.code == 0 or was_aborted_at_exit(rank)):
        return Shown(exit_.groups, "left")
    placed = standing_at(exit_.groups) is not None
    if exit_.by == "itself" and not (exit_.code == -signal.SIGABRT and placed):
        return None
    return Shown(exit_.groups, "waits" if placed else "away", doing(exit_))


def _world_size(rank: RankFacts) -> int:
    return rank.state.world_size if rank.state is not None else 0
