"""The answer: which rank and module was first, why we know, and how sure we are. A pure function of the facts.

Clocks of different hosts are not compared. A rank's place in the run is (attempt, number of collectives that it had
issued, step, batch): between two matching collectives only local order exists, so two origins there are concurrent.
"""

from __future__ import annotations

from .answer import Verdict
from .ending_verdict import ending_verdict, interrupted_verdict, lost_node_verdict, unexplained_verdict
from .facts import RunFacts
from .overflow_verdict import overflow_verdict
from .preflight_verdict import preflight_verdict


def decide(facts: RunFacts) -> Verdict:
    """The verdict of a run."""
    for rule in (
        preflight_verdict,
        overflow_verdict,
        ending_verdict,
        lost_node_verdict,
        interrupted_verdict,
        unexplained_verdict,
    ):
        verdict = rule(facts)
        if verdict is not None:
            return verdict
    return _clean(facts)


def _clean(facts: RunFacts) -> Verdict:
    ranks = facts.of_attempt(facts.last_attempt)
    batches = max((rank.exit.where.batch + 1 for rank in ranks if rank.exit is not None), default=0)
    return Verdict(
        kind="clean",
        statement=(
            f"No overflow: {len(ranks)} rank{'s' if len(ranks) != 1 else ''}, {batches} batches, "
            "every watched tensor finite."
        ),
        certainty="established" if all(rank.script_exit is not None for rank in ranks) and ranks else "supported",
        attempt=facts.last_attempt,
    )
