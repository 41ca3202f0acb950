"""The verdict: which rank and module was first, why we know, and how sure we are. A pure function of the facts.

Clocks of different hosts are not compared (order.py). Between two matching collectives there is only local order, so
two origins there are concurrent.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...core.verdicts import Certainty
from ..facts.facts import RunFacts
from ..report.model import Verdict
from .clean_verdict import clean_verdict, lost_messages, unnamed_overflow_verdict
from .ending_verdict import ending_verdict, interrupted_verdict, lost_node_verdict, unexplained_verdict
from .hang_verdict import ended_verdict, hang_verdict
from .node_advice import with_drain, with_gpu
from .overflow_verdict import overflow_verdict
from .preflight_verdict import check_verdict, preflight_verdict


def decide(facts: RunFacts) -> Verdict:
    """The verdict of a run."""
    for rule in (
        preflight_verdict,
        overflow_verdict,
        unnamed_overflow_verdict,
        hang_verdict,
        ended_verdict,
        ending_verdict,
        lost_node_verdict,
        interrupted_verdict,
        check_verdict,
        unexplained_verdict,
    ):
        verdict = rule(facts)
        if verdict is not None:
            return with_drain(facts, with_gpu(facts, _less_sure(facts, verdict)))
    return clean_verdict(facts)


def _less_sure(facts: RunFacts, verdict: Verdict) -> Verdict:
    """A message that is missing may have told of something earlier."""
    lost = lost_messages(facts)
    if not lost or verdict.certainty != Certainty.ESTABLISHED:
        return verdict
    return replace(verdict, certainty=Certainty.SUPPORTED, evidence=[*verdict.evidence, *lost])
