"""The verdict of a run in which nothing went wrong: what was looked at, and how close it came.

"Clean" needs proof (missing.py). Without it the verdict is `unknown`, with what is missing.
"""

from __future__ import annotations

from ...core.frames import module_text
from ...core.recorder.lone_process import is_rank, pid_of_number, rank_name
from ...core.text.shown import shown_name
from ..facts.facts import RankFacts, RunFacts
from .missing import batches_of, missing, nothing_watched, ran_another_program
from .notices import warning_text, worst_first
from .verdict_model import Verdict
from .words import ranks_text, step_for_compiled, told_its_end, unseen_texts

_MOST_EVIDENCE = 12
_BY_ANOTHER_PROGRAM = (
    "gpuwatch launch watches the Python script that it runs itself. Every Python that another program starts is "
    "watched by gpuwatch run: gpuwatch run -- torchrun, with the same arguments (--no-python python train.py)."
)

_BY_THE_MODULE = (
    "To have what goes into a compiled module and comes out looked at, compile the module, torch.compile(model), in "
    "place of a function that calls it."
)


def clean_verdict(facts: RunFacts) -> Verdict:
    """No overflow, where that is proven; else what is missing for the proof."""
    if nothing_watched(facts):
        return _nothing_watched(facts)
    lacking = missing(facts)
    return _unproven(facts, lacking) if lacking else _clean(facts)


def _nothing_watched(facts: RunFacts) -> Verdict:
    """Every rank was watched to its end, and there was nothing to look at. That is no proof of anything."""
    ranks = facts.of_attempt(facts.last_attempt)
    return Verdict(
        kind="unknown",
        statement=f"Nothing was watched: no module was called on {_ranks(len(ranks))}.",
        certainty="unknown",
        attempt=facts.last_attempt,
        evidence=[
            "gpuwatch looks at what the modules of a rank's own process are given and return, and none was called; "
            "what other processes do that a script starts is not watched",
            *_loose_lines(ranks),
        ],
        missing=missing(facts),
    )


def _unproven(facts: RunFacts, lacking: list[str]) -> Verdict:
    more = f", and {len(lacking) - 1} more (below)" if len(lacking) > 1 else ""
    ranks = facts.of_attempt(facts.last_attempt)
    return Verdict(
        kind="unknown",
        statement=f"No overflow seen, but it is not proven that there was none: {lacking[0]}{more}.",
        certainty="unknown",
        attempt=facts.last_attempt,
        evidence=lacking[:_MOST_EVIDENCE] if more else [],
        next=[
            *([_BY_ANOTHER_PROGRAM] if any(map(ran_another_program, ranks)) else []),
            *([_BY_THE_MODULE] if any(not each.around for rank in ranks for each in rank.not_looked_into) else []),
        ],
        missing=lacking[:_MOST_EVIDENCE],
    )


def _clean(facts: RunFacts) -> Verdict:
    """Says no more than what was looked at."""
    ranks = [*facts.of_attempt(facts.last_attempt), *facts.lone(facts.last_attempt)]
    batches = max(map(batches_of, ranks), default=0)
    idle = max((rank.batches_skipped for rank in facts.everyone.values()), default=0)  # before a restart, too
    scope = f"{_ranks_and_processes(ranks)}, {batches} batch{'es' if batches != 1 else ''}"
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
    statement += "".join(f" {text[0].upper()}{text[1:]}." for text in unseen_texts(ranks))
    loose = _loose_lines(ranks)
    if loose:
        statement += f" {loose[0][0].upper()}{loose[0][1:]}{f', and {len(loose) - 1} more' if loose[1:] else ''}."
    warnings = worst_first([(rank.rank, warned) for rank in ranks for warned in rank.warned])
    if warnings:
        number, worst = warnings[0]
        more = f", and {len(warnings) - 1} more" if len(warnings) > 1 else ""
        statement += f" Closest to trouble: {rank_name(number)}, {warning_text(worst)}{more}."
    return Verdict(
        kind="clean",
        statement=statement,
        certainty="established" if all(map(told_its_end, ranks)) and not loose else "supported",
        attempt=facts.last_attempt,
        next=[
            *([step_for_compiled(ranks)] if hidden else []),
            *(["Look into every batch with --every 1."] if idle and not any(rank.costs for rank in ranks) else []),
        ],
    )


def unnamed_overflow_verdict(facts: RunFacts) -> Verdict | None:
    """A rank says that it has seen an overflow, and its record of where has not come through."""
    ranks = [rank for rank in facts.everyone.values() if rank.state is not None and rank.state.overflow]
    if not ranks:
        return None
    attempt = min(rank.attempt for rank in ranks)
    numbers = sorted(rank.rank for rank in ranks if rank.attempt == attempt)
    alone = len(numbers) == 1
    return Verdict(
        kind="overflow",
        statement=f"{ranks_text(numbers).capitalize()} saw an overflow; which module it was in is unknown.",
        certainty="unknown",
        rank=numbers[0] if alone and is_rank(numbers[0]) else None,
        pid=pid_of_number(numbers[0]) if alone and not is_rank(numbers[0]) else None,
        host=(facts.host(facts.one(attempt, numbers[0])) or None) if alone else None,
        attempt=attempt,
        evidence=["the header of the recorder says so, and the event itself was lost"],
    )


def _loose_lines(ranks: list[RankFacts]) -> list[str]:
    """What optimizers stepped on that no module has: what is computed with it has no frames.

    What nobody has looked at there is missing for a proof: it is told with that.
    """
    by_what: dict[tuple[str, int], list[int]] = {}
    for rank in ranks:
        for loose in rank.loose_parameters:
            if not loose.unread:
                by_what.setdefault((loose.optimizer, loose.parameters), []).append(rank.rank)
    return [
        f"on {ranks_text(numbers)} {optimizer} stepped on {count} parameter{'' if count == 1 else 's'} that "
        f"belong{'s' if count == 1 else ''} to no module that was called: {'it was' if count == 1 else 'they were'} "
        "looked at after each step, and nowhere else"
        for (optimizer, count), numbers in by_what.items()
    ]


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"


def _ranks_and_processes(ranks: list[RankFacts]) -> str:
    """`2 ranks`, `1 rank and 1 process that is no rank`."""
    known = sum(is_rank(rank.rank) for rank in ranks)
    lone = len(ranks) - known
    others = f"{lone} process{'es' if lone != 1 else ''} that {'are' if lone != 1 else 'is'} no rank"
    return " and ".join([*([_ranks(known)] if known or not lone else []), *([others] if lone else [])])


def _looked_at(batches: int, idle: int) -> str:
    """`every 5th was looked into`, or what is known of it."""
    if 0 < idle < batches:
        every = round(batches / (batches - idle))
        return f"only one in {every} was looked into"
    return f"{idle} {'was' if idle == 1 else 'were'} left out"


def _led_nowhere(number: int, ranks: list[RankFacts]) -> str:
    """`6 tensors of nan out of masks that the model took away`, or the first of them, where there are others."""
    tensors = f"{number} tensor{'s' if number != 1 else ''}"
    others = [told for rank in ranks for told in rank.absorbed if told.why]
    if not others:
        return f"{tensors} of nan out of masks that the model took away"
    first = others[0]
    place = f"{first.value} in {shown_name(first.role)} of {module_text(first.module, first.cls)}"
    return f"{tensors} that led nowhere (first: {place})"


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
        found.append(_led_nowhere(absorbed, ranks))
    return f", but for {' and '.join(found)}" if found else ""
