"""The verdict of a run without a failure: which tensors were checked, and how close they were to their limits.

"Clean" needs proof (`missing`). Without it the verdict is `unknown` and lists the gaps (proof_gaps.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from operator import itemgetter

from ...core.codes import Certainty, VerdictKind, coded
from ...core.frames import module_text
from ...core.identity import is_rank, rank_name
from ...core.text import ranks_text as numbers_text
from ...core.text import shown_name
from ..facts.rank_facts import RankFacts
from ..facts.run_facts import RunFacts
from ..facts.words import step_for_compiled, warning_text, whose, worst_first
from ..report.sentence_parts import counted, grouped, ranks_text
from ..report.verdict import Verdict
from .proof_gaps import first_of, missing

_MOST_EVIDENCE = 12
_BY_ANOTHER_PROGRAM = (
    "gpuwatch launch watches only the Python script that it runs itself. To watch every Python that another program "
    "starts, use gpuwatch run: gpuwatch run -- torchrun, with the same arguments (--no-python python train.py)."
)
_NOTHING_CALLED = (
    "gpuwatch checks the inputs and outputs of the modules in a rank's own process, and none was called; it does not "
    "watch other processes that a script starts"
)
_BY_THE_MODULE = (
    "To have the inputs and outputs of a compiled module inspected, compile the module, torch.compile(model), instead "
    "of a function that calls it."
)


def clean_verdict(facts: RunFacts) -> Verdict:
    """`clean` if it is proven that nothing overflowed; else `unknown`, with the gaps in the proof."""
    gaps = missing(facts)
    if not gaps:
        return _clean(facts)
    lacking = [clause for _, clause in gaps]
    ranks = facts.of_attempt(facts.last_attempt)
    below = " (below)" if len(lacking) > 1 else ""
    statement = f"No overflow seen, but it is not proven that there was none: {first_of(lacking)}{below}."
    if not facts.has_ended:
        statement = f"No overflow seen so far: {_scope(ranks)}."
    evidence = [coded(clause, code) for code, clause in gaps[:_MOST_EVIDENCE]] if below or not facts.has_ended else []
    idle = f"{numbers_text([rank.rank for rank in ranks])} called no module"
    if ranks and not facts.processes and lacking == [idle]:  # all were watched to their ends: that proves nothing
        has_stepped = any(rank.state is not None and rank.state.step > 0 for rank in ranks)
        what = "Only steps of optimizers were" if has_stepped else "Nothing was"
        statement = f"{what} watched: no module was called on {counted(len(ranks), 'rank')}."
        evidence = [_NOTHING_CALLED, *_loose_lines(ranks)]
    return Verdict(
        VerdictKind.UNKNOWN,
        statement,
        Certainty.UNKNOWN,
        attempt=facts.last_attempt,
        evidence=evidence,
        next=[
            *([_BY_ANOTHER_PROGRAM] if any(rank.ran_another_program for rank in ranks) else []),
            *([_BY_THE_MODULE] if any(not each.around for rank in ranks for each in rank.not_looked_into) else []),
        ],
        missing=lacking[:_MOST_EVIDENCE],
        cause_code=gaps[0][0],
    )


def _clean(facts: RunFacts) -> Verdict:
    ranks = [*facts.of_attempt(facts.last_attempt), *facts.lone(facts.last_attempt)]
    batches, scope = _batches(ranks), _scope(ranks)
    idle = max((rank.counts.batches_skipped for rank in facts.everyone.values()), default=0)  # before a restart, too
    statement = f"No overflow: {scope}, every watched tensor finite{_exceptions(ranks)}."
    if idle:
        looked_at = f"{idle} {'was' if idle == 1 else 'were'} skipped"
        if idle < batches:
            looked_at = f"only one in {round(batches / (batches - idle))} was inspected"
        scope += f" ({looked_at})"
        statement = f"No overflow seen: {scope}, every inspected tensor was finite{_exceptions(ranks)}."
    hidden = sorted({module_text(each.module, each.cls) for rank in ranks for each in rank.not_looked_into})
    if hidden:
        more = f" and {len(hidden) - 1} more" if len(hidden) > 1 else ""
        statement += f" Compiled code inside {hidden[0]}{more} was not inspected."
    unseen = dict.fromkeys(unseen.text for rank in ranks for unseen in rank.compiled_unseen)
    statement += "".join(f" {text[0].upper()}{text[1:]}." for text in unseen)
    # before a restart, too, and in order, whoever was heard first
    everyone = [rank for found in (facts.ranks, facts.processes) for _, rank in sorted(found.items())]
    doubts = [*_loose_lines(ranks), *_unread_lines(everyone), *_child_lines(everyone)]
    if doubts:
        statement += f" {doubts[0][0].upper()}{first_of(doubts)[1:]}."
    warnings = worst_first([(rank.rank, warned) for rank in ranks for warned in rank.warned])
    if warnings:
        closest = [f"{rank_name(number)}, {warning_text(warned)}" for number, warned in warnings]
        statement += f" Closest to trouble: {first_of(closest)}."
    is_told = all(rank.told_its_end for rank in ranks) and not doubts and not idle
    return Verdict(
        VerdictKind.CLEAN,
        statement,
        Certainty.ESTABLISHED if is_told else Certainty.SUPPORTED,
        attempt=facts.last_attempt,
        next=[
            *([step_for_compiled(ranks)] if hidden else []),
            *(["Inspect every batch with --every 1."] if idle else []),
        ],
    )


def unnamed_overflow_verdict(facts: RunFacts) -> Verdict | None:
    """A rank says that it has seen an overflow, and its record of where has not come through."""
    ranks = [rank for rank in facts.everyone.values() if rank.counts.overflow]
    if not ranks:
        return None
    attempt = min(rank.attempt for rank in ranks)
    numbers = sorted(rank.rank for rank in ranks if rank.attempt == attempt)
    one = whose(facts, facts.one(attempt, numbers[0])) | {"device": None} if len(numbers) == 1 else {}
    return Verdict(
        VerdictKind.OVERFLOW,
        f"{ranks_text(numbers).capitalize()} saw an overflow; its module is unknown.",
        Certainty.UNKNOWN,
        **one,
        attempt=attempt,
        evidence=["the recorder's header says so; the event itself was lost"],
    )


def _loose_lines(ranks: list[RankFacts]) -> list[str]:
    """Lines on parameters that optimizers stepped on but no called module has, so that no frames show their use.

    Those never read are a gap in the proof, which `missing` reports instead.
    """
    loose = ((rank.rank, each) for rank in ranks for each in rank.loose_parameters if not each.unread)
    by_what = grouped(loose, lambda entry: (entry[1].optimizer, entry[1].parameters))
    return [
        f"on {ranks_text([number for number, _ in found])} {optimizer} updated {counted(count, 'parameter')} that "
        f"belong{'s' if count == 1 else ''} to no module that was called: {'it was' if count == 1 else 'they were'} "
        "read after each step, and nowhere else"
        for (optimizer, count), found in by_what.items()
    ]


def _unread_lines(ranks: list[RankFacts]) -> Iterator[str]:
    """Lines on what an optimizer kept in 16 bits after its last step, and that nobody has read."""
    unread = ((rank.rank, each) for rank in ranks for each in rank.unread_states)
    for (optimizer, steps), found in grouped(unread, lambda entry: (entry[1].optimizer, entry[1].steps)).items():
        yield (
            f"on {ranks_text([number for number, _ in found])} what {optimizer} keeps in 16 bits or less was not read "
            f"after its last {counted(steps, 'step')}: it was freed before"
        )


def _child_lines(ranks: list[RankFacts]) -> list[str]:
    """Lines on children that have called modules by themselves. One that has trained is a gap in the proof."""
    return [
        f"a child process (pid {pid}) of {rank_name(rank.rank)} called modules and was not watched"
        for rank in ranks
        if (pid := rank.counts.calling_child)
    ]


def _batches(ranks: list[RankFacts]) -> int:
    return max((rank.batches for rank in ranks), default=0)


def _scope(ranks: list[RankFacts]) -> str:
    """`2 ranks, 1 batch`"""
    batches = _batches(ranks)
    return f"{_ranks_and_processes(ranks)}, {batches} batch{'es' if batches != 1 else ''}"


def _ranks_and_processes(ranks: list[RankFacts]) -> str:
    """`2 ranks`, `1 rank and 1 process that is no rank`."""
    known = sum(is_rank(rank.rank) for rank in ranks)
    lone = len(ranks) - known
    others = f"{lone} processes that are not ranks" if lone != 1 else "1 process that is not a rank"
    return " and ".join([*([counted(known, "rank")] if known or not lone else []), *([others] if lone else [])])


def _led_nowhere(number: int, ranks: list[RankFacts]) -> str:
    """`6 tensors of nan out of masks that the model took away`, or the first of them, where there are others."""
    tensors = counted(number, "tensor")
    others = [told for rank in ranks for told in rank.absorbed if told.why]
    if not others:
        return f"{tensors} of nan from masks, which the model discarded"
    first = others[0]
    place = f"{first.value} in {shown_name(first.role)} of {module_text(first.module, first.cls)}"
    return f"{tensors} that had no effect (first: {place})"


def _passed(ranks: list[RankFacts]) -> list[str]:
    """`+inf that rank 1 put into all_reduce in batch 5`: the first that passed between ranks and led nowhere."""
    bad = [(one.where.batch, one.came_out, rank.rank, one) for rank in ranks for one in rank.passed]
    if not bad:
        return []
    batch, came_out, number, one = min(bad, key=itemgetter(0, 1, 2))
    did = "got from" if came_out else "put into"
    when = f"in batch {batch}" if batch >= 0 else "before its first batch"
    more = f" (and {counted(len(bad) - 1, 'more such tensor')})" if len(bad) > 1 else ""
    return [f"{one.value} that {rank_name(number)} {did} {one.operation} {when}{more}"]


_MOST_PAGES = 32
"""That are looked through for a mask. A page is read again from the store only if something in it is not finite."""


def _masks(ranks: list[RankFacts]) -> list[str]:
    """`-inf alone, as in masks (first: output of `mask` (Mask))`: what modules returned, else what they were handed."""
    told = min((each for rank in ranks for each in rank.masks), key=lambda each: each.where.batch, default=None)
    if told is not None:
        place = f"{shown_name(told.role)} of {module_text(told.module, told.cls)}"
        return [f"-inf alone, as in masks (first: {place})"]
    pages = islice((page for rank in ranks for page in rank.pages.values()), _MOST_PAGES)
    found = next((found for page in pages if (found := page.first_mask) is not None), None)
    if found is None:
        return []
    frame, row = found
    return [f"-inf alone, as in masks (such as {shown_name(row.role)} of {module_text(frame.module, frame.cls)})"]


def _exceptions(ranks: list[RankFacts]) -> str:
    hidden, absorbed = sum(rank.hidden_rows for rank in ranks), sum(rank.absorbed_rows for rank in ranks)
    skipping = [rank.rank for rank in ranks if rank.skipped_steps]
    found = [f"{counted(hidden, 'row')} that --ignore hides"] if hidden else []
    found += [f"gradients whose step a GradScaler skipped on {ranks_text(skipping)}"] if skipping else []
    found += [_led_nowhere(absorbed, ranks)] if absorbed else []
    found += _passed(ranks)
    found += _masks(ranks)
    return f", except for {' and '.join(found)}" if found else ""
