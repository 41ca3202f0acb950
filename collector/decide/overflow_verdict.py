"""The verdict of a run with a non-finite value: which rank and module was first, if that can be known."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import PurePath
from typing import TypeVar

import msgspec

from ...core.codes import Certainty, VerdictKind
from ...core.events.alarm_evidence import CaptureFile, SecondRun
from ...core.events.run_position import RankEvent
from ...core.frames import FramePhase, module_text
from ...core.identity import is_rank, rank_name
from ...core.roles import is_param_group
from ..cause.backward_cause import bad_variable
from ..cause.cause import cause_of
from ..cause.cause_clues import CauseClues
from ..cause.training_cause import of_growth
from ..facts.diagnosis import LocalDiagnosis
from ..facts.rank_facts import RankFacts
from ..facts.replicas import OddWeight, odd_weight, page_of, run_the_same_model
from ..facts.run_facts import RunFacts
from ..facts.words import between_text, cascade_of, step_for_compiled, whose
from ..report.sentence_parts import one_on, ranks_text
from ..report.verdict import ConcurrentOrigin, OverflowCause, Verdict
from .diagnosis_order import DiagnosisOrder
from .doubts import doubts_about
from .gradient_sum import of_reduced
from .overflow_advice import AdviceClues, clues_of, next_steps
from .overflow_evidence import evidence_of, is_compiled, large_weight, number_of_ranks, of_concurrent
from .overflow_words import (
    NOBODY_LOOKED,
    batch_text,
    explain_command,
    is_alike,
    is_of_no_module,
    operation_lines,
    operation_of,
    place_in_collective,
    place_of,
    sentence,
)
from .own_before import way_text, without_fed
from .passed_values import PassedOperations, ValueArrival, as_passed, fed_lines
from .unlike_ranks import unlike_tensor

_TIERS = (
    ("made", "changed", "buffer"),
    ("outside", "weight", "unread", "left"),
    ("skipped",),
    ("reduced",),
    ("received",),
    ("carried",),
)
"""Sources of diagnoses (facts/diagnosis.py), the strongest first. Where nothing shows which of several came first, only
those of the first line that occurs here are named: whoever made a value can have sent it to whoever received it."""
_CAUGHT = (
    "To have the job end at an overflow, let OverflowDetected pass where the script catches errors (except Exception)."
)
_BEHIND_WEIGHTS = (FramePhase.FORWARD, FramePhase.LOSS)
"""Where a value may have come of a weight of a module before."""
_MOST_PASSED = 8
"""How many ranks whose value came from outside are checked for transfers that may have brought it."""


def overflow_verdict(facts: RunFacts) -> Verdict | None:
    """The earliest non-finite value of the earliest attempt that saw one; None if there was none."""
    diagnoses = [rank.diagnosis for rank in facts.everyone.values() if rank.diagnosis is not None]
    if not diagnoses:
        return None
    first_attempt = min(diagnosis.attempt for diagnosis in diagnoses)
    diagnoses = [d for d in diagnoses if d.attempt == first_attempt]
    order = DiagnosisOrder(sorted(diagnoses, key=lambda d: (not is_rank(d.rank), d.rank)))
    level = order.earliest()
    outside = [d for d in level if d.source == "outside"][:_MOST_PASSED]
    level = without_fed(facts, [as_passed(facts, d) if d in outside else d for d in level])
    tier = next(found for tier in _TIERS if (found := [d for d in level if d.source in tier]))
    first = tier[0]
    passages = PassedOperations(facts, first_attempt)
    fed = passages.fed_by(first)
    if fed is not None:
        return _fed(facts, tier, order, passages, fed)
    if first.source == "reduced":
        return of_reduced(facts, tier, order, passages)
    alone = len(tier) == 1
    if first.source == "skipped":
        return _skipped(facts, tier, order) if alone else _unknown(facts, tier)
    if first.source == "received" or (not alone and all(d.source in ("weight", "unread", "carried") for d in tier)):
        return _unknown(facts, tier)
    if first.source == "weight" and is_param_group(first.module) and number_of_ranks(facts, first_attempt) > 1:
        return _unknown(facts, tier)  # its gradient may be a sum over all ranks, and it was not read
    # each rank may have been fed it, unless one rank is fed what another has made
    fed_too = [d for d in level if d not in tier and d.source in ("outside", "weight", "unread", "left")]
    page = page_of(facts, first)
    rest = [*tier[1:], *(d for d in fed_too if run_the_same_model(page, page_of(facts, d)))]
    may_be_odd = first.source in ("made", "weight") and first.phase in (FramePhase.FORWARD, FramePhase.WEIGHT)
    odd = odd_weight(facts, first) if may_be_odd else None
    if odd is not None and odd.certain:
        first = _of_weight(first, odd)
    return _named(facts, first, rest, order, odd)


def _fed(
    facts: RunFacts, tier: list[LocalDiagnosis], order: DiagnosisOrder, passages: PassedOperations, fed: ValueArrival
) -> Verdict:
    """The verdict where another rank has passed the value on, or a sum over the ranks has made it."""
    met = tier[0]
    put = fed.put
    if put is None:
        return _of_sum(facts, met, order, fed)
    others = [one for one in tier[1:] if (theirs := passages.fed_by(one)) is None or theirs.rank != fed.rank]
    own = next((one for one in order.diagnoses if one.rank == fed.rank), None)
    was_there = own is not None and (own.issued.seq <= put.where.seq or own.step <= put.where.step)
    if own is not None and was_there and (own.source in ("outside", "weight") or own.issued.seq <= put.where.seq):
        first = replace(own, notes=(*own.notes, *fed_lines(fed)))
        return _named(facts, first, [one for one in others if one is not own], order, None)
    # none of the modules of the rank that has put it in is known to have made it
    rank = facts.ranks[met.attempt, put.where.rank]
    batch = f"batch {met.batch}" if met.batch >= 0 else "its first batch"
    return Verdict(
        VerdictKind.OVERFLOW,
        f"{one_on(rank.rank, facts.host(rank))} put {put.value} into {way_text(put)}; rank {met.rank} received it "
        f"in {batch} ({met.text}). No module of rank {rank.rank} was seen to make it: code that no frame shows "
        "made it, or received it.",
        Certainty.SUPPORTED,
        **whose(facts, rank),
        **(place_in_collective(met) | {"value": put.value, "step": put.where.step, "batch": put.where.batch}),
        evidence=[*fed_lines(fed), *met.notes, f"rank {rank.rank}: none of its module calls is known to have made it"],
        next=[f"Look at what rank {rank.rank} computes outside its modules, or receives, before {way_text(put)}."],
        cascade=cascade_of(facts, met.attempt, {rank.rank}),
    )


def _of_sum(facts: RunFacts, met: LocalDiagnosis, order: DiagnosisOrder, fed: ValueArrival) -> Verdict:
    """The verdict where every rank put finite numbers into a reduction, and what came out was not finite."""
    failed = [line for rank in facts.of_attempt(met.attempt) for line in doubts_about(rank)]
    came = fed.ways[-1]
    return Verdict(
        VerdictKind.OVERFLOW,
        f"{came.value} came out of {way_text(came)} in batch {met.batch}: what every rank put in was finite, "
        f"but their sum was not ({came.dtype}).",
        Certainty.SUPPORTED if failed else Certainty.ESTABLISHED,
        **place_in_collective(met),
        evidence=[*fed_lines(fed), *met.notes, *failed],
        next=["Divide before the sum, or add up in float32 or bfloat16.", *explain_command(facts, met, of_sum=True)],
        cascade=cascade_of(facts, met.attempt, {other.rank for other in order.diagnoses}),
    )


def _of_weight(first: LocalDiagnosis, odd: OddWeight) -> LocalDiagnosis:
    """The diagnosis that blames the rank's copy of a weight for what looked like an overflow in its module."""
    if first.phase == FramePhase.WEIGHT and first.role == odd.row.role:
        # the other copies tell more than its own past
        return replace(first, sure=first.sure or bool(first.weight.history))
    note = f"its {first.role} had {first.row.value}, from finite inputs"
    return replace(
        first, phase=FramePhase.WEIGHT, source="weight", role=odd.row.role, between=None, notes=(*first.notes, note)
    )


_E = TypeVar("_E", bound=RankEvent)


def _at(first: LocalDiagnosis, event: _E | None) -> _E | None:
    """The event, if it is about the place of a diagnosis."""
    is_there = event is not None and (event.where.batch, event.where.root) == (first.batch, first.root)
    return event if is_there else None


def _second_run(first: LocalDiagnosis, rank: RankFacts) -> SecondRun | None:
    """What it has found. A rank that ended may not have come to the one that was to follow."""
    ran = _at(first, rank.second_run)
    alarm = next((each for each in rank.anomalies if each.looks and _at(first, each) is not None), None)
    if ran is not None or alarm is None or rank.exit is None or rank.runs_on or _at(first, rank.captured) is not None:
        return ran
    what = "backward" if alarm.phase == FramePhase.BACKWARD else "forward"
    return SecondRun(alarm.where, unknown=f"{rank_name(rank.rank)} ended before that {what} had run again")


def _capture_of(facts: RunFacts, first: LocalDiagnosis, rest: list[LocalDiagnosis]) -> CaptureFile | None:
    """The file of the rank, or of one that overflowed alike: the first to end may have ended it as it wrote."""
    found = None
    for one in [first, *(other for other in rest if is_alike(first, other))]:
        event = _at(one, facts.one(one.attempt, one.rank).captured)
        if event is not None and event.file.path:
            note = [] if one is first else [f"of rank {one.rank}, which overflowed alike"]
            return msgspec.structs.replace(event.file, notes=[*event.file.notes, *note])
        found = found or (event.file if event is not None else None)
    return found


def _replay_steps(file: CaptureFile | None) -> list[str]:
    """The command that runs a captured forward again."""
    if file is None or not file.path:
        return []
    path = PurePath(file.path)
    run = str(path.parent if path.name == "overflow.pt" else path)
    trust = " --trust" if file.needs_trust else ""
    return [f"Run this forward again, alone and in each dtype:\ngpuwatch replay {shlex.quote(run)}{trust}"]


def _in_order(
    cause: OverflowCause | None, steps: list[str], replay: list[str], explains: list[str], *, went_on: bool
) -> list[str]:
    """The advice of a known cause comes first, with the replay that shows whether it mends. Without one, what finds it
    does: a replay, or where nothing ran again because the training went on, the run with that batch watched."""
    if cause is not None and cause.next:
        first, *others = steps
        together = [f"{first} {replay[0]}"] if replay and "\n" not in first else [first, *replay]
        return [*together, *others, *explains]
    return [*replay, *explains, *steps] if went_on else [*replay, *steps, *explains]


def _named(
    facts: RunFacts, first: LocalDiagnosis, rest: list[LocalDiagnosis], order: DiagnosisOrder, odd: OddWeight | None
) -> Verdict:
    hosts = {d.rank: facts.host(facts.one(d.attempt, d.rank)) for d in (first, *rest)}
    blamed = odd if odd is not None and odd.certain else None
    page = page_of(facts, first)
    large = large_weight(page, first.row.frame) if page is not None and first.step == 0 and first.is_origin else None
    rank = facts.one(first.attempt, first.rank)
    of_loss = first.phase == FramePhase.LOSS
    may_be_run = of_loss or (first.is_origin and first.phase in (FramePhase.FORWARD, FramePhase.BACKWARD))
    ran = _second_run(first, rank) if may_be_run else None
    operation = operation_of(first, ran)
    clues = clues_of(facts, first, odd, large[0] if large is not None else "")
    earlier = odd_weight(facts, first, before=True) if odd is None and first.phase in _BEHIND_WEIGHTS else None
    earlier = earlier if earlier is not None and earlier.certain else None
    cause = cause_of(CauseClues(facts, first, blamed, earlier, clues.wild, large, ran, operation))
    clues = replace(clues, cause=cause, operation=operation)
    certainty, evidence = evidence_of(facts, first, order, rest, odd or earlier, clues.wild)
    if large is not None:
        evidence.append(f"the largest weight up to that point: {large[0]}, abs max {large[1]}")
    capture = _capture_of(facts, first, rest) if may_be_run and first.phase == FramePhase.FORWARD else None
    unlike = unlike_tensor(facts, first) if first.is_origin else None
    evidence[1:1] = [*operation_lines(ran, operation, first.phase), *([unlike.line] if unlike is not None else [])]
    number, variable = number_of_ranks(facts, first.attempt), bad_variable(facts, first) if of_loss else ""
    lacks_line = may_be_run and (operation is None or (of_loss and not operation.line))
    explains = explain_command(facts, first, ran, went_on=clues.went_on, operation=operation) if lacks_line else []
    place = place_of(first)
    if of_loss:
        place |= {"module": None, "cls": None, "role": None}
    return Verdict(
        VerdictKind.OVERFLOW,
        sentence(first, hosts[first.rank], rest, blamed, number, variable),
        certainty,
        **whose(facts, rank),
        **place,
        operation=operation,
        capture=capture,
        cause=cause,
        between=first.between,
        evidence=evidence,
        next=[
            *([step_for_compiled([rank])] if is_compiled(facts, first) else []),
            *_in_order(cause, next_steps(first, clues), _replay_steps(capture), explains, went_on=clues.went_on),
            *([_CAUGHT] if rank.went_on_after_overflow else []),
        ],
        concurrent=[
            ConcurrentOrigin(d.rank, d.module, d.cls, d.own_role, d.row.value, hosts[d.rank], d.text, d.shown_by)
            for d in rest
        ],
        cascade=cascade_of(facts, first.attempt, {first.rank, *(d.rank for d in rest)}),
    )


def _skipped(facts: RunFacts, tier: list[LocalDiagnosis], order: DiagnosisOrder) -> Verdict:
    """The rank is known. What happened in it is known by a second run alone: its batch was skipped."""
    first = tier[0]
    rank = facts.one(first.attempt, first.rank)
    who = one_on(first.rank, facts.host(rank))
    ran = _second_run(first, rank)
    operation = ran.operation if ran is not None else None
    seen = f"returned {first.row.value} from {first.root or 'its model'}"
    if first.phase == FramePhase.BACKWARD:
        seen = f"had {first.row.value} in the {first.role} of {first.place}, the last gradient of its backward,"
    found = "the module is unknown; to find it, watch every batch with --every 1"
    module, cls, advised, clues = None, None, first, AdviceClues()
    if ran is not None and operation is not None:
        module, cls = operation.module, ran.cls or None
        again = "that forward and its backward" if first.phase == FramePhase.BACKWARD else "that forward"
        found = f"in a second run of {again} {module_text(module, cls or first.root)} made it"
        advised, clues = replace(first, source="made"), AdviceClues(operation=operation)
    evidence = [
        f"{rank_name(first.rank)}, batch {first.batch}: {first.text}",
        *operation_lines(ran, operation, first.phase),
    ]
    evidence += of_concurrent(first, [d for d in order.diagnoses if d is not first and not order.before(first, d)])
    return Verdict(
        VerdictKind.OVERFLOW,
        f"{who} {seen} in {batch_text(first)}, which was {first.cause}: {found}.",
        Certainty.SUPPORTED,
        **whose(facts, rank),
        **(place_of(first) | {"module": module, "cls": cls}),
        operation=operation,
        evidence=evidence,
        next=next_steps(advised, clues),
        cascade=cascade_of(facts, first.attempt, {first.rank}),
    )


def _unknown(facts: RunFacts, tier: list[LocalDiagnosis]) -> Verdict:
    """Several ranks met it at once, and none made it in a watched place. No rank is named."""
    first = tier[0]
    cause = of_growth(CauseClues(facts, first))
    place = place_of(first)
    if first.source == "skipped":
        place |= {"module": None, "cls": None}
    return Verdict(
        VerdictKind.OVERFLOW,
        _unknown_sentence(tier),
        Certainty.UNKNOWN,
        **place,
        cause=cause,
        evidence=[*(f"{rank_name(d.rank)}: {d.text}, batch {d.batch}" for d in tier[:8]), *first.notes],
        between=first.between,
        next=next_steps(first, replace(clues_of(facts, first), cause=cause)),
    )


def _unknown_sentence(tier: list[LocalDiagnosis]) -> str:
    """The statement where several ranks met it and the first is unknown."""
    first = tier[0]
    who = ranks_text([f.rank for f in tier]).capitalize()
    cause = f" ({first.cause})" if first.cause and first.source != "skipped" else ""
    batch = f"batch {first.batch}"
    if first.source == "skipped":
        return f"{who} met {first.row.value} in {batch}, which was skipped ({first.cause}): its origin is unknown."
    if first.source == "received":
        where = f"in the {first.role} of {first.place}" if first.row.phase != FramePhase.LOSS else "in the loss"
        if first.row.phase == FramePhase.BACKWARD:
            where = f"in the backward of {first.place}"
        elif first.between is not None:
            where = f"in {first.place}'s own forward, {between_text(first.between)}"
        why = "collectives ran there, so it may have come from any rank"
        return f"{who} met {first.row.value} in {batch} {where}; {why}{cause}."
    what = "a non-finite weight" if first.source == "weight" else "a non-finite value"
    when, why = f"in {batch} at the same point", NOBODY_LOOKED
    if first.source == "weight" and first.row.phase == FramePhase.OPTIMIZER:
        when = f"after the step of {batch}"
        why = "the gradients that went into that step were not read, so the first rank is unknown"
    elif first.source != "unread" or is_of_no_module(first):
        why = "it was made earlier, in code that was not watched, so the first rank is unknown"
    return f"{who} met {what} {when} ({first.text}); {why}{cause}."
