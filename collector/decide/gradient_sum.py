"""The verdict over a gradient that was finite when a rank's backward made it, and not when the optimizer got it.

The numbers of all ranks say whether a sum over the ranks can have made it:

own gradients of 4e4 and 4e4 in float16      the sum of 8e4 is beyond 65504: it is inf
own gradients of 0.06 and 0 in float32       no sum of them is inf: other code has made it
nan                                          is no sum of finite numbers
inf on one rank, finite on another           a sum is the same on all ranks

If a sum made it, no rank is at fault. If none did, code that no frame shows made it: clipping, normalisation, a
communication hook. If the optimizers of the other ranks got the same gradient finite, that code ran on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...core.codes import Certainty, VerdictKind
from ...core.events.across_ranks import PassedTensor
from ...core.frames import FramePhase, Row, RowKind
from ...core.values import DTYPE_MAX, NonFinite
from ..cause.cause_clues import CauseClues
from ..cause.script_cause import cause_between
from ..cause.training_cause import of_growth
from ..facts.diagnosis import LocalDiagnosis, number_text, rows_in
from ..facts.kept_pages import KeptPage
from ..facts.replicas import page_of, peers
from ..facts.run_facts import RunFacts
from ..facts.words import cascade_of, whose
from ..report.sentence_parts import one_on, ranks_text
from ..report.verdict import RankFields, Verdict
from .diagnosis_order import DiagnosisOrder
from .doubts import doubts_about
from .overflow_advice import next_steps
from .overflow_evidence import missing_ranks
from .overflow_words import explain_command, place_of
from .own_before import way_text
from .passed_values import PassedOperations, RankSummand, element_line, put_line

Answer = Literal["sum", "narrower", "no"]
"""sum         the sum is beyond the largest number of the gradient's dtype
narrower    it is not, but it is beyond that of float16: a reduction in float16 gives inf
no          no sum over the ranks gives that value
"""

_NARROWER = "float16"
_MOST_SHOWN = 4


@dataclass(frozen=True)
class GradientSum:
    """One gradient as each rank's own backward made it, and as the optimizers of the ranks got it."""

    own: Mapping[int, Row]
    """Rank -> its own gradient, the largest of the step."""
    got: Mapping[int, Row]
    """Rank -> what its optimizer got. A rank that was stopped before its step is not in it."""

    @property
    def bound(self) -> float:
        """No element of the sum is larger."""
        return sum(row.abs_max or 0.0 for row in self.own.values())

    @property
    def fine(self) -> list[int]:
        """The ranks whose optimizers got a finite one."""
        return sorted(rank for rank, row in self.got.items() if row.finite)

    @property
    def is_alike(self) -> bool:
        """Whether nothing contradicts that all ranks got the same."""
        return len({(row.nan, _has_inf(row)) for row in self.got.values()}) <= 1

    @property
    def answer(self) -> Answer:
        """Whether a sum can have made what the optimizers got."""
        bad = [row for row in self.got.values() if not row.finite]
        if not bad or not all(map(_has_inf, bad)):
            return "no"
        limits = [DTYPE_MAX.get(row.dtype, 0.0) for row in bad]
        if self.bound > min(limits):
            return "sum"
        return "narrower" if self.bound > DTYPE_MAX[_NARROWER] else "no"

    @property
    def is_proven(self) -> bool:
        """Whether the sum explains all that was seen. Inf less inf is nan, but that no frame shows."""
        return self.answer == "sum" and self.is_alike and not any(row.nan for row in self.got.values())

    def line(self) -> str:
        """Each rank's own gradient against the limit, as a line."""
        shown = [f"{number_text(row.abs_max)} on rank {rank}" for rank, row in sorted(self.own.items())[:_MOST_SHOWN]]
        more = len(self.own) - len(shown)
        dtype = next(iter(self.got.values())).dtype
        limit = f"; {dtype} holds at most {number_text(DTYPE_MAX[dtype])}" if dtype in DTYPE_MAX else ""
        others = f", and {more} more ranks" if more else ""
        of_sum = f"their sum is at most {number_text(self.bound)}{limit}"
        return f"abs max of each rank's own gradient: {', '.join(shown)}{others}; {of_sum}"


def _has_inf(row: Row) -> bool:
    return bool(row.flags & (NonFinite.POSINF | NonFinite.NEGINF | NonFinite.INF))


def of_reduced(
    facts: RunFacts, tier: list[LocalDiagnosis], order: DiagnosisOrder, passages: PassedOperations
) -> Verdict:
    """The verdict over gradients that were non-finite when the optimizers got them, from the pages of all ranks."""
    first = tier[0]
    ranks = facts.of_attempt(first.attempt)
    pages = {first.rank: page_of(facts, first), **peers(facts, first)}
    own = {rank.rank: _own(pages.get(rank.rank), first) for rank in ranks}
    finite = {number for number, rows in own.items() if rows and all(row.finite for row in rows)}
    largest = {number: max(rows, key=lambda row: row.abs_max or 0.0) for number, rows in own.items() if rows}
    reduced = {rank.rank: _rows(pages.get(rank.rank), FramePhase.COLLECTIVE) for rank in ranks}
    key = (first.module, first.role)
    found = GradientSum(largest, {number: rows[key] for number, rows in reduced.items() if key in rows})
    unseen = [rank.rank for rank in ranks if rank.rank not in finite]
    unseen_text = [f"{ranks_text(unseen)}: no finite gradient of its own was seen"] if unseen else []
    missing = missing_ranks(facts, first.attempt)
    bad = [other for other in tier if (other.module, other.role) == key]
    if len(ranks) == 1 and not missing and first.rank in finite:
        return _own_step(facts, first, [f"rank {first.rank} is alone: nothing was reduced"])
    if len(bad) == 1 and found.fine and first.rank in finite and _agree(reduced[first.rank], reduced[found.fine[0]]):
        line = f"{ranks_text(found.fine)}: the same gradient, reduced as well, was finite before the step"
        return _own_step(facts, first, [line])
    failed = [line for rank in ranks for line in doubts_about(rank)]
    settled = not unseen and not missing and len(ranks) > 1
    evidence = [f"rank {other.rank}: {other.text}, batch {other.batch}" for other in tier[:8]]
    if settled:
        who = ranks_text([rank.rank for rank in ranks])
        element = _element_line(facts, found, first)
        evidence += [f"{who}: the gradient was finite when the backward made it", *_sum_lines(found, first), *element]
    put = passages.put_into_sum(first) if settled and found.answer != "sum" else None
    cause = f" ({first.cause})" if first.cause else ""
    proven = found.is_proven and not failed
    whose_code: RankFields = {}
    if put is not None:
        rank = facts.one(first.attempt, put.where.rank)
        whose_code = whose(facts, rank)
        evidence.append(put_line(put, ", every other rank finite numbers"))
    hook = cause_between(rank, put.where.step, put.elements) if put is not None else None
    return Verdict(
        VerdictKind.OVERFLOW,
        _statement(first, tier, found if settled else None, put) + cause,
        Certainty.UNKNOWN if not settled else Certainty.ESTABLISHED if proven else Certainty.SUPPORTED,
        **whose_code,
        **(place_of(first) | {"phase": FramePhase.COLLECTIVE}),
        cause=hook,
        evidence=[*evidence, *unseen_text, *missing, *first.notes, *failed],
        next=[
            *(hook.next if hook is not None else []),
            *_next(first, found, unseen if not settled else [])[hook is not None :],
            *(explain_command(facts, first, of_sum=True) if settled and found.answer != "no" else []),
        ],
        cascade=cascade_of(facts, first.attempt, {other.rank for other in order.diagnoses}),
    )


def _statement(
    first: LocalDiagnosis, tier: list[LocalDiagnosis], found: GradientSum | None, put: PassedTensor | None
) -> str:
    """`found`: what all ranks' gradients say; None if not all of them are known. `put`: what one put into the sum."""
    what = f"{first.row.value} in the {first.role} of {first.place}"
    if found is None:
        who = ranks_text([other.rank for other in tier]).capitalize()
        after = "after the gradients were reduced: it may have come from any rank"
        return f"{who} met {what} before the step of batch {first.batch}, {after}."
    finite = "every rank's own gradient was finite"
    if found.answer == "sum":
        where = f"the reduction over the ranks in batch {first.batch}"
        return f"{what} came out of {where}: {finite}, but their sum was not ({first.row.dtype})."
    code = f"{_NO_SUM[found.answer]}; code that no frame shows made it"
    if put is not None:
        where = f"by rank {put.where.rank} between its backward and {way_text(put)} in batch {first.batch}"
        hooks = "a communication hook, the script's clipping or normalisation"
        return f"{what} was made {where}: {finite}, and {code} ({hooks})."
    bad = sorted({first.rank, *(rank for rank, row in found.got.items() if not row.finite)})
    where = f"between the backward and the step of batch {first.batch} on {ranks_text(bad)}"
    hooks = "the script's clipping or normalisation, a communication hook"
    return f"{what} was made {where}: {finite}, and {code} ({hooks}), and on which rank is unknown."


_BETWEEN = "gradients between backward() and step()"
_NO_SUM = {"narrower": "their sum is too, unless it is reduced in float16", "no": "no sum of them gives that value"}


def _sum_lines(found: GradientSum, first: LocalDiagnosis) -> list[str]:
    if not found.own or not found.got:
        return []
    is_nan = first.row.value == "nan" and found.answer == "no"
    lines = [found.line(), *(["nan is no sum of finite numbers"] if is_nan else [])]
    if found.fine:
        lines.append(f"{ranks_text(found.fine)}: what the optimizer got was finite, and a sum is the same on all ranks")
    return lines


def _element_line(facts: RunFacts, found: GradientSum, first: LocalDiagnosis) -> list[str]:
    """What each rank's own gradient had at the first bad element, with --explain N."""
    summands = []
    for rank, row in sorted(found.own.items()):
        anomaly = next(iter(facts.one(first.attempt, rank).anomalies), None)
        is_there = anomaly is not None and (anomaly.module, anomaly.role) == (first.module, first.role)
        again = anomaly.again if anomaly is not None and is_there and anomaly.where.step == first.step else None
        summands.append(RankSummand(rank, again.reduced if again is not None else None, row.abs_max))
    dtype = _NARROWER if found.answer == "narrower" else first.row.dtype
    line = element_line(f"its {first.role}, as each backward made it", summands, dtype) if found.answer != "no" else ""
    return [line] if line else []


def _next(first: LocalDiagnosis, found: GradientSum, unseen: list[int]) -> list[str]:
    if unseen:
        own = f"{'its' if len(unseen) == 1 else 'their'} own"
        look = f"Look at what {ranks_text(unseen)} computed in that step: no gradient of {own} was seen there."
        return [look, *next_steps(first)[-1:]]
    if found.answer == "sum":
        return next_steps(first)
    why = "a norm of 0, a count of 0 tokens, a scale of inf"
    if all(row.abs_max == 0 for row in found.own.values()):
        why = "every own gradient was 0, so dividing by their norm divides by 0"
    return [
        f"Look at what the script does with {_BETWEEN}, and at a communication hook: {why}.",
        *(["Let the communication hook divide before it sums, or reduce in bfloat16."] * (found.answer == "narrower")),
        *next_steps(first)[-1:],
    ]


def _own_step(facts: RunFacts, first: LocalDiagnosis, evidence: list[str]) -> Verdict:
    rank = facts.one(first.attempt, first.rank)
    who, failed = one_on(first.rank, facts.host(rank)), doubts_about(rank)
    what = f"{first.role} of {first.place}, batch {first.batch}{f' ({first.cause})' if first.cause else ''}"
    seen = f"rank {first.rank}: the gradient"
    code = "code between the backward and the step did it (clipping, unscaling, the script's own code)"
    cause = of_growth(CauseClues(facts, first))
    return Verdict(
        VerdictKind.OVERFLOW,
        f"{who} made {first.row.value} out of a finite gradient before its step: {what}; {code}.",
        Certainty.ESTABLISHED if first.from_page and not failed else Certainty.SUPPORTED,
        **whose(facts, rank),
        **(place_of(first) | {"phase": FramePhase.OPTIMIZER}),
        cause=cause,
        evidence=[
            f"{seen} was finite when the backward made it",
            *_norm_lines(page_of(facts, first)),
            *evidence,
            *first.notes,
            *failed,
        ],
        next=[
            *(cause.next if cause is not None else []),
            f"Look at what the script does with {_BETWEEN}: a norm of 0, a scale of inf.",
        ],
        cascade=cascade_of(facts, first.attempt, {first.rank}),
    )


def _norm_lines(page: KeptPage | None) -> list[str]:
    """Whether the norm of a rank's own gradients is too large a number, though each of them is finite."""
    sizes = [row.abs_max or 0.0 for row in _rows(page, FramePhase.BACKWARD).values() if row.finite]
    largest = max(sizes, default=0.0)
    if largest**2 <= DTYPE_MAX["float32"]:
        return []
    square = "its square is beyond float32, so that a norm over it is inf"
    return [f"the largest gradient of that backward has abs max {number_text(largest)}: {square}"]


def _own(page: KeptPage | None, first: LocalDiagnosis) -> list[Row]:
    """A rank's gradients of that parameter, as its own backward made them."""
    if page is None:
        return []
    frames = sorted(page.frames, key=lambda frame: frame.index)
    frame = next((each for each in frames if each.phase == FramePhase.COLLECTIVE and each.module == first.module), None)
    if frame is not None:
        return rows_in(frames, FramePhase.BACKWARD, frame, first.role, before=True)
    # the rank was stopped before its step
    row = _rows(page, FramePhase.BACKWARD).get((first.module, first.role))
    return [row] if row is not None else []


def _rows(page: KeptPage | None, phase: FramePhase) -> dict[tuple[str, str], Row]:
    """(module, role) -> the last gradient in that phase."""
    return {
        (frame.module, row.role): row
        for frame in sorted(page.frames if page is not None else (), key=lambda frame: frame.index)
        if frame.phase == phase
        for row in frame.gradients
        if row.kind == RowKind.MEASURED
    }


def _agree(mine: dict[tuple[str, str], Row], theirs: dict[tuple[str, str], Row]) -> bool:
    """Whether two ranks got the same gradients otherwise, so that each holds what all ranks hold."""
    both = [key for key in mine.keys() & theirs.keys() if mine[key].finite and theirs[key].finite]
    return bool(both) and all(mine[key].abs_max == theirs[key].abs_max for key in both)
