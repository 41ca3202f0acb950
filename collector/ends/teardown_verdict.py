"""The verdict of ranks that lost another one, which took its process group down while it handled an exception. Pure.

Its own script had not ended when its launcher stopped it. So the exception may have been caught: nothing is
established. The others lose their connection at once, or wait until the group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.codes import Certainty, VerdictKind
from ...core.events.script_events import GroupTeardown
from ...core.identity import rank_name
from ...core.text import ranks_text
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..facts.words import cascade_of, error_line, first_line, when_of, whose
from ..report.sentence_parts import one_on
from ..report.verdict import ConcurrentOrigin, Verdict
from .ending_order import endings_of, took_down_before
from .known_crashes import known_lines, known_steps


def teardown_verdict(facts: RunFacts) -> Verdict | None:
    """None unless all that ended by themselves lost a peer after that, and their launcher stopped every other rank."""
    ranks, endings = facts.of_attempt(facts.last_attempt), endings_of(facts, facts.last_attempt)
    victims = endings.by_themselves
    if not facts.failed_by_itself or not victims or endings.first is not None:
        return None
    others = [rank for rank in ranks if rank not in victims]
    if len(ranks) < facts.announced_ranks or any(rank.exit is None or rank.exit.by != "torchrun" for rank in others):
        return None
    left = [rank for rank in others if rank.teardown is not None and not rank.teardown.peer_failure]
    left = [rank for rank in left if all(took_down_before(facts, rank, victim) for victim in victims)]
    if not left:
        return None
    first, *beside = sorted(left, key=lambda rank: rank.rank)
    teardown = first.teardown
    assert teardown is not None
    also = f" (and {ranks_text([rank.rank for rank in beside])})" if beside else ""
    lost = ranks_text([rank.rank for rank in victims])
    return Verdict(
        VerdictKind.CRASH,
        f"{one_on(first.rank)}{also} on {facts.host(first)} took its process group down while it handled "
        f"{_exception(teardown)}, and {lost} could not go on without it.",
        Certainty.SUPPORTED,
        **whose(facts, first),
        **when_of(teardown.where),
        evidence=[
            *known_lines(teardown.message),
            teardown.traceback.strip(),
            *(
                f"rank {rank.rank}, after {error.where.collectives} collectives: {first_line(error.message)}"
                for rank in victims
                if (error := rank.error) is not None
            ),
        ],
        next=[next(iter(known_steps(teardown.message)), "The script itself failed: its traceback is above.")],
        concurrent=[
            ConcurrentOrigin(rank.rank, "", "", None, "", facts.host(rank), f"handled {rank.teardown.error}")
            for rank in beside
            if rank.teardown is not None
        ],
        cascade=cascade_of(facts, facts.last_attempt, {rank.rank for rank in left}),
    )


def handled_lines(ranks: Iterable[RankFacts]) -> list[str]:
    """What ranks handled as they took their process groups down, those that have not said how they ended."""
    return [
        f"{rank_name(rank.rank)} took its process group down while it handled {_exception(rank.teardown)}"
        for rank in ranks
        if rank.teardown is not None and not rank.errors and rank.script_exit is None
    ]


def _exception(teardown: GroupTeardown) -> str:
    said = error_line(teardown.message)
    return f"{teardown.error}{f': {said}' if said else ''}"
