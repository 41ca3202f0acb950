"""The verdict of a run in which nothing went wrong: what was looked at, and how close it came.

"Clean" needs proof (missing.py). Without it the verdict is `unknown`, with what is missing.
"""

from __future__ import annotations

from ...core.frames import module_text
from ..facts.facts import RankFacts, RunFacts
from .missing import batches_of, missing, nothing_watched
from .notices import warning_text, worst_first
from .verdict_model import Verdict
from .words import COMPILED, ranks_text

_MOST_EVIDENCE = 12


def clean_verdict(facts: RunFacts) -> Verdict:
    """No overflow, where that is proven; else what is missing for the proof."""
    if nothing_watched(facts):
        return _nothing_watched(facts)
    lacking = missing(facts)
    return _unproven(facts, lacking) if lacking else _clean(facts)


def _nothing_watched(facts: RunFacts) -> Verdict:
    """Nothing is missing, and there was nothing to look at: the exit code is that of a clean run."""
    ranks = facts.of_attempt(facts.last_attempt)
    return Verdict(
        kind="unknown",
        statement=f"Nothing was watched: no module was called on {_ranks(len(ranks))}.",
        certainty="unknown",
        attempt=facts.last_attempt,
        evidence=[
            "gpuwatch looks at what the modules of a rank's own process are given and return, and none was called; "
            "what other processes do that a script starts is not watched"
        ],
    )


def _unproven(facts: RunFacts, lacking: list[str]) -> Verdict:
    more = f", and {len(lacking) - 1} more (below)" if len(lacking) > 1 else ""
    return Verdict(
        kind="unknown",
        statement=f"No overflow seen, but it is not proven that there was none: {lacking[0]}{more}.",
        certainty="unknown",
        attempt=facts.last_attempt,
        evidence=lacking[:_MOST_EVIDENCE] if more else [],
        missing=lacking[:_MOST_EVIDENCE],
    )


def _clean(facts: RunFacts) -> Verdict:
    """Says no more than what was looked at."""
    ranks = facts.of_attempt(facts.last_attempt)
    batches = max(map(batches_of, ranks), default=0)
    idle = max((rank.batches_skipped for rank in facts.ranks.values()), default=0)  # before a restart, too
    scope = f"{_ranks(len(ranks))}, {batches} batch{'es' if batches != 1 else ''}"
    if idle:
        scope += f" ({_looked_at(batches, idle)})"
        finite = "every tensor that was looked at was finite"
    else:
        finite = "every watched tensor finite"
    statement = f"No overflow{' seen' if idle else ''}: {scope}, {finite}{_exceptions(ranks)}."
    hidden = sorted({module_text(each.module, each.cls) for rank in ranks for each in rank.not_looked_into})
    if hidden:
        more = f" and {len(hidden) - 1} more" if len(hidden) > 1 else ""
        statement += f" Inside of {hidden[0]}{more}, compiled code was not looked into."
    warnings = worst_first([(rank.rank, warned) for rank in ranks for warned in rank.warned])
    if warnings:
        number, worst = warnings[0]
        more = f", and {len(warnings) - 1} more" if len(warnings) > 1 else ""
        statement += f" Closest to trouble: rank {number}, {warning_text(worst)}{more}."
    return Verdict(
        kind="clean",
        statement=statement,
        certainty="established" if all(map(_told_its_end, ranks)) else "supported",
        attempt=facts.last_attempt,
        next=[
            *([COMPILED] if hidden else []),
            *(["Look into every batch with --every 1."] if idle and not any(rank.costs for rank in ranks) else []),
        ],
    )


def unnamed_overflow_verdict(facts: RunFacts) -> Verdict | None:
    """A rank says that it has seen an overflow, and its record of where has not come through."""
    ranks = [rank for rank in facts.ranks.values() if rank.state is not None and rank.state.overflow]
    if not ranks:
        return None
    attempt = min(rank.attempt for rank in ranks)
    numbers = sorted(rank.rank for rank in ranks if rank.attempt == attempt)
    alone = len(numbers) == 1
    return Verdict(
        kind="overflow",
        statement=f"{ranks_text(numbers).capitalize()} saw an overflow; which module it was in is unknown.",
        certainty="unknown",
        rank=numbers[0] if alone else None,
        host=(facts.host(facts.ranks[attempt, numbers[0]]) or None) if alone else None,
        attempt=attempt,
        evidence=["the header of the recorder says so, and the event itself was lost"],
    )


def _told_its_end(rank: RankFacts) -> bool:
    """Whether its script has come to an end; or it has left its group, and nothing was called from there to its end.

    Ray kills its workers once they have left their group.
    """
    if rank.script_exit is not None:
        return True
    left, end = rank.left_group, rank.exit
    if left is None or end is None or end.phase != "script":
        return False
    return (left.where.step, left.where.batch) == (end.where.step, end.where.batch)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"


def _looked_at(batches: int, idle: int) -> str:
    """`every 5th was looked into`, or what is known of it."""
    if 0 < idle < batches:
        every = round(batches / (batches - idle))
        return f"only one in {every} was looked into"
    return f"{idle} {'was' if idle == 1 else 'were'} left out"


def _exceptions(ranks: list[RankFacts]) -> str:
    """What was not finite and no alarm."""
    found = []
    hidden = sum(rank.hidden_rows for rank in ranks)
    if hidden:
        found.append(f"{hidden} row{'s' if hidden != 1 else ''} that --ignore hides")
    skipping = [rank for rank in ranks if rank.skipped_steps]
    if skipping:
        found.append(f"gradients whose step a GradScaler skipped on {ranks_text([rank.rank for rank in skipping])}")
    absorbed = sum(rank.absorbed_rows for rank in ranks)
    if absorbed:
        found.append(f"{absorbed} tensor{'s' if absorbed != 1 else ''} of nan out of masks that the model took away")
    return f", but for {' and '.join(found)}" if found else ""
