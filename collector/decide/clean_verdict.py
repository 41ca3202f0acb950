"""The verdict of a run in which nothing went wrong: what was looked at, and how close it came."""

from __future__ import annotations

from ..facts import RankFacts, RunFacts
from ..report.notices import warning_text, worst_first
from .verdict_model import Verdict
from .words import ranks_text


def clean_verdict(facts: RunFacts) -> Verdict:
    """No overflow; says no more than what was looked at."""
    ranks = facts.of_attempt(facts.last_attempt)
    batches = max((rank.exit.where.batch + 1 for rank in ranks if rank.exit is not None), default=0)
    idle = max((rank.batches_skipped for rank in ranks), default=0)
    scope = f"{len(ranks)} rank{'s' if len(ranks) != 1 else ''}, {batches} batches"
    if idle:
        scope += f" ({_looked_at(batches, idle)})"
        finite = "every tensor that was looked at was finite"
    else:
        finite = "every watched tensor finite"
    statement = f"No overflow{' seen' if idle else ''}: {scope}, {finite}{_exceptions(ranks)}."
    warnings = worst_first([(rank.rank, warned) for rank in ranks for warned in rank.warned])
    if warnings:
        number, worst = warnings[0]
        more = f", and {len(warnings) - 1} more" if len(warnings) > 1 else ""
        statement += f" Closest to trouble: rank {number}, {warning_text(worst)}{more}."
    return Verdict(
        kind="clean",
        statement=statement,
        certainty="established" if all(rank.script_exit is not None for rank in ranks) and ranks else "supported",
        attempt=facts.last_attempt,
        next=["Look into every batch with --every 1."] if idle and not any(rank.costs for rank in ranks) else [],
    )


def _looked_at(batches: int, idle: int) -> str:
    """`every 5th was looked into`, or what is known of it."""
    if 0 < idle < batches:
        every = round(batches / (batches - idle))
        return f"only one in {every} was looked into"
    return f"{idle} were left out"


def _exceptions(ranks: list[RankFacts]) -> str:
    """What was not finite and no alarm."""
    found = []
    hidden = sum(rank.hidden_rows for rank in ranks)
    if hidden:
        found.append(f"{hidden} row{'s' if hidden != 1 else ''} that --ignore hides")
    skipping = [rank for rank in ranks if rank.skipped_steps]
    if skipping:
        found.append(f"gradients whose step a GradScaler skipped on {ranks_text([rank.rank for rank in skipping])}")
    return f", but for {' and '.join(found)}" if found else ""
