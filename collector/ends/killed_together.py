"""Ranks without a handler that one signal from outside has ended, all at the same time. Pure.

A preemption or a site's script may signal the ranks alone. The kernel ends a rank that has no handler, and nothing of
the rank tells who sent the signal. torchrun sends SIGTERM to the other ranks, too, once one has failed: those ends are
recorded as torchrun's.
"""

from __future__ import annotations

from ...core.codes import Certainty, VerdictKind
from ...core.recorder.heard_signals import HEARD
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..facts.words import cascade_of, doing
from ..report.rank_states import signal_name
from ..report.sentence_parts import grouped, ranks_text
from ..report.verdict import Verdict
from .preempted_ranks import follows

TOGETHER_S = 2.0
"""Ranks of one host that ended further apart did not get one signal. A large process takes a while to end."""


def killed_together_verdict(facts: RunFacts) -> Verdict | None:
    """None unless one signal ended all ranks, or all of some nodes, and two at least.

    Those of other nodes may have ended because of that. One rank that a signal ends while others live may have been
    killed for a reason of its own.
    """
    if not facts.failed_by_itself:
        return None
    ranks = facts.of_attempt(facts.last_attempt)
    killed = [rank for rank in ranks if rank.error is None and -(rank.own_code or 0) in HEARD]
    numbers = {-(rank.code or 0) for rank in killed}
    others = [rank for rank in ranks if rank not in killed]
    by_node = grouped(killed, lambda rank: rank.agent)
    if (
        len(killed) < 2
        or len(numbers) > 1
        or len(ranks) < facts.announced_ranks
        or any(rank.agent in by_node for rank in others)
        or not all(follows(rank) for rank in others)
    ):
        return None
    spreads = [_spread_s(same) for same in by_node.values()]
    if max(spreads) > TOGETHER_S:
        return None
    name, on_each = signal_name(numbers.pop()), " on each node" if len(by_node) > 1 else ""
    within = f", within {max(1.0, 1000 * max(spreads)):.0f} ms{on_each}" if len(killed) > len(by_node) else ""
    hosts = ", ".join(sorted({facts.nodes[agent].name for agent in by_node if agent in facts.nodes}))
    whose = f"{ranks_text(_numbers(killed))}, all of {hosts}" if others else f"all {len(killed)} ranks"
    whose = "both ranks" if len(killed) == 2 and not others else whose
    return Verdict(
        VerdictKind.INTERRUPTED,
        f"{name} from outside ended {whose}{within}; no overflow had been seen.",
        Certainty.SUPPORTED,
        attempt=facts.last_attempt,
        signal=name,
        evidence=[
            *_place_lines(killed, name),
            f"{facts.starter} got no signal, and each of these ranks ended before {facts.starter} stopped any",
            "what is sent to all ranks at once is a preemption, a scheduler's end of a step, or a kill by their name",
        ],
        next=["Start the job again from its last checkpoint. To save one at the signal, handle it in the script."],
        cascade=cascade_of(facts, facts.last_attempt, set(_numbers(killed))),
    )


def _numbers(ranks: list[RankFacts]) -> list[int]:
    return [rank.rank for rank in ranks]


def _spread_s(ranks: list[RankFacts]) -> float:
    """How far apart ranks of one host ended at most; inf if that is not known."""
    exits = [rank.exit for rank in ranks if rank.exit is not None]
    if not all(exit_.ended_ns for exit_ in exits):
        return float("inf")
    first_ns = min(exit_.alive_ns or exit_.ended_ns for exit_ in exits)
    return (max(exit_.ended_ns for exit_ in exits) - first_ns) / 1e9


def _place_lines(killed: list[RankFacts], name: str) -> list[str]:
    """`ranks 0 and 1 were ended by SIGTERM in the forward of batch 3`"""
    places = grouped(killed, lambda rank: doing(rank.exit) if rank.exit is not None else "")
    return [
        f"{ranks_text(_numbers(same))} {'was' if len(same) == 1 else 'were'} ended by {name} {place}"
        for place, same in places.items()
    ]
