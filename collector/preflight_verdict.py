"""The verdict of a run that its preflight has stopped."""

from __future__ import annotations

from .answer import Cascade, Verdict
from .facts import RankFacts, RunFacts
from .words import local_rank_of, ranks_text


def preflight_verdict(facts: RunFacts) -> Verdict | None:
    """The rank that failed by its own fault; None if the preflight stopped nothing."""
    ranks = facts.of_attempt(facts.last_attempt)
    if not any(rank.preflight is not None and rank.preflight.stops for rank in ranks):
        return None
    guilty = [rank for rank in ranks if rank.preflight is not None and rank.preflight.outcome == "failed"]
    victims = [rank for rank in ranks if rank.preflight is not None and rank.preflight.outcome == "victim"]
    cascade = [Cascade(rank.rank, _preflight_text(rank)) for rank in victims]
    evidence = [f"rank {rank.rank} on {facts.host(rank)}: {_preflight_text(rank)}" for rank in [*guilty, *victims]]
    if not guilty:
        return Verdict(
            kind="preflight",
            statement="The preflight failed; each rank that failed was waiting for another: nobody is to blame.",
            certainty="unknown",
            attempt=facts.last_attempt,
            evidence=evidence,
            next=["Run it again with NCCL_DEBUG=INFO and look at the rank that is missing from the evidence."],
            cascade=cascade,
        )
    first = guilty[0]
    assert first.preflight is not None
    others = f" (and {ranks_text([rank.rank for rank in guilty[1:]])})" if guilty[1:] else ""
    host = facts.host(first)
    return Verdict(
        kind="preflight",
        statement=(
            f"Preflight: rank {first.rank}{others} on {host} failed in stage {first.preflight.stage}: "
            f"{first.preflight.detail}."
        ),
        certainty="established",
        rank=first.rank,
        host=host,
        device=first.preflight.device or None,
        attempt=first.attempt,
        stage=first.preflight.stage,
        evidence=evidence,
        next=[f"Look at {host}, local rank {local_rank_of(first)}, or leave that node out of the next run."],
        cascade=cascade,
    )


def _preflight_text(rank: RankFacts) -> str:
    assert rank.preflight is not None
    return f"{rank.preflight.outcome} in stage {rank.preflight.stage}: {rank.preflight.detail}"
