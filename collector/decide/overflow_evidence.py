"""Why a verdict about an overflow is what it is, and how sure it is."""

from __future__ import annotations

import math

from ...core.bad_values import NAMED_BY_SCRIPT
from ...core.codes import Certainty
from ...core.frames import FramePhase, module_text
from ...core.identity import rank_name
from ...core.judge import first_alarm, first_expected_gradient
from ...core.roles import RoleKind, parse_role
from ..ends.missing_nodes import unheard_nodes
from ..facts.diagnosis import LocalDiagnosis, number_text
from ..facts.kept_pages import KeptPage
from ..facts.replicas import WILD, OddWeight, WildWeight, page_of, peers, run_the_same_model
from ..facts.run_facts import RunFacts
from ..report.sentence_parts import counted, ranks_text
from .batch_words import source_line
from .diagnosis_order import DiagnosisOrder, reason
from .doubts import doubts_about
from .overflow_advice import wild_line
from .overflow_words import is_alike

_MAX_LINES = 8


def evidence_of(
    facts: RunFacts,
    first: LocalDiagnosis,
    order: DiagnosisOrder,
    concurrent: list[LocalDiagnosis],
    odd: OddWeight | None,
    wild: WildWeight | None,
) -> tuple[Certainty, list[str]]:
    """(certainty, lines) of a verdict that names a rank."""
    lines = [*_of_itself(first), *first.notes]
    rank = facts.one(first.attempt, first.rank)
    if rank.caught_overflow:
        went_on = rank.went_on_after_overflow
        untrained = " without an optimizer step" if rank.only_evaluated_after_overflow else ""
        then = f"went on to batch {rank.batches - 1}{untrained}" if went_on else "ended with exit code 0 in that batch"
        lines.insert(1, f"the script caught OverflowDetected, which was to end it, and {then}")
    if first.mask.turned is not None and not first.mask.text:
        lines.append(f"-inf alone is expected in masks; {module_text(*first.mask.turned)} turned it into nan")
    lines += _of_weight(first, odd)
    # whether the first non-finite row was an output, also where a weight that differs is blamed for it
    made = parse_role(first.row.role).kind is RoleKind.OUTPUT
    is_odd = odd is not None and odd.agreed_in is None and odd.place == first.place and made
    doubts = [""] if first.source in ("carried", "unread") or not first.sure or is_odd else []
    if not first.from_page:
        frames = f"the frames of batch {first.batch} of {rank_name(first.rank)}"
        doubts.append(f"{frames} were not received, or not all of their names")
    doubts += doubts_about(rank)
    doubts += _of_compiled(facts, first)
    doubts += of_concurrent(first, concurrent, number_of_ranks(facts, first.attempt))
    doubts += _of_unwatched(facts, first)
    doubts += _unsettled(facts, first, order.diagnoses)
    if first.source == "outside" and first.phase in (FramePhase.BACKWARD, FramePhase.LOSS):
        doubts += _of_stages(facts, first)
    later = [other for other in order.diagnoses if order.before(first, other)]
    when = (f"batch {each.batch}, {each.place}{reason(first, each)}" for each in later)
    lines += _alike(later, [f"first saw a non-finite value later: {text}" for text in when])
    if later and first.issued.seq < 0:
        doubts.append("the ranks had no process group, so their batches alone put them in order")
    known = {first.rank, *(other.rank for other in concurrent), *(other.rank for other in later)}
    others = [other for other in order.diagnoses if other.rank not in known]
    lines += _of_silent_groups(order) if others or concurrent else []
    lines += _alike(others, [f"met {each.text}, batch {each.batch}: {_HANDED[each.source]}" for each in others])
    lines += _of_clean(facts, first)
    lines += _of_inputs(facts, first)
    if wild is not None:
        doubts.append(wild_line(wild))
    return (Certainty.SUPPORTED if doubts else Certainty.ESTABLISHED), [*lines, *filter(None, doubts)]


def _alike(diagnoses: list[LocalDiagnosis], said: list[str]) -> list[str]:
    """A line for each thing that is said, with all the ranks that it holds for."""
    ranks: dict[str, list[int]] = {}
    for diagnosis, text in zip(diagnoses, said, strict=True):
        ranks.setdefault(text, []).append(diagnosis.rank)
    lines = [f"{ranks_text(sorted(who))} {text}" for text, who in ranks.items()]
    rest = sum(map(len, [*ranks.values()][_MAX_LINES:]))
    return [*lines[:_MAX_LINES], *([f"{counted(rest, 'more rank')} likewise, in other places"] if rest else [])]


def _of_unwatched(facts: RunFacts, first: LocalDiagnosis) -> list[str]:
    found = [rank.rank for rank in facts.of_attempt(first.attempt) if rank.rank != first.rank and rank.was_not_watched]
    if not found:
        return []
    was, it = ("was", "it") if len(found) == 1 else ("were", "one of them")
    return [f"{ranks_text(found)} {was} not watched: {it} may have been first"]


def _of_silent_groups(order: DiagnosisOrder) -> list[str]:
    silent = order.silent_groups()
    if not silent:
        return []
    several = f"groups {', '.join(silent)} count" if len(silent) > 1 else f"group {silent[0]} counts"
    return [f"process {several} no collectives, or other operations too, which puts no ranks in order"]


def _of_inputs(facts: RunFacts, first: LocalDiagnosis) -> list[str]:
    rank, name = facts.one(first.attempt, first.rank), f"batch {first.batch} of {rank_name(first.rank)}"
    lines = [source_line(found, name) for found in rank.batch_sources if found.where.batch == first.batch][:1]
    batch = next((found for found in rank.batch_inputs if found.where.batch == first.batch), None)
    if batch is None:
        return lines
    digests = ", ".join(f"{role} {digest}" for role, digest in batch.digests.items())
    return [*lines, f"fingerprint of {name}, to find the sample again: {digests}"]


def is_compiled(facts: RunFacts, first: LocalDiagnosis) -> bool:
    """Whether the named module runs compiled code without frames: a module inside it may be the maker."""
    rank = facts.one(first.attempt, first.rank)
    return first.is_origin and any(
        (hidden.module, hidden.cls) == (first.module, first.cls) for hidden in rank.not_looked_into
    )


def _of_compiled(facts: RunFacts, first: LocalDiagnosis) -> list[str]:
    unseen = facts.one(first.attempt, first.rank).compiled_unseen
    doubts = [each.text for each in unseen] if first.phase == FramePhase.BACKWARD else []
    if is_compiled(facts, first):
        doubts.append(f"compiled code inside {first.place} was not inspected: a module inside it can have made it")
    return doubts


_EXCLUDED = "the other users of that tensor in autograd's graph cannot have made it"
_HANDED = {
    "made": "it was made there, later",
    "outside": "the value came from outside its model",
    "weight": "no frame shows when it became bad",
    "unread": "its weights were not read",
    "changed": "a weight was changed there outside of forward, backward and step",
    "skipped": "that batch was skipped",
    "reduced": "it came out of a reduction over the ranks",
    "received": "collectives ran there, so another rank can have sent it",
    "carried": "its origin was not seen",
    "left": "it was in a gradient before that backward began",
    "buffer": "a buffer held it before that forward",
}


def _of_itself(first: LocalDiagnosis) -> list[str]:
    where = f"{rank_name(first.rank)}, batch {first.batch}, frame {first.row.frame}"
    seen = first.row.place
    if first.source == "carried":
        return [f"{where}: {first.place} received a non-finite value; its origin was not seen"]
    if first.cls == NAMED_BY_SCRIPT and first.source in ("made", "unread"):
        return [f"{where}: the tensor that detect_overflow was given was not finite"]
    if first.source == "unread":
        return [f"{where}: inputs of {first.place} were finite, its {first.role} was not; its weights were not checked"]
    if first.source == "buffer":
        return [
            f"{where.rpartition(',')[0]}: {first.role} of {first.place} held {first.row.value} when the forward began"
        ]
    if first.source == "left":
        left = "what was in .grad when the module was first called was still there when it began"
        return [f"{where}: {first.role} of {seen} was not finite before that backward began: {left}"]
    if first.phase == FramePhase.FORWARD and first.is_origin:
        if first.between is not None or first.makers.own_code:
            return [f"{where}: no module call before it returned a non-finite value"]
        finite, more = f"inputs and weights of {first.place} were finite", ""
        if first.mask.text:
            finite = f"weights and inputs of {first.place} were finite but for a -inf"
        elif not first.weight.was_read:
            since = f"after step {first.step}" if first.step else "before the first step"
            finite = f"inputs of {first.place} were finite"
            more = f"; its weights were finite when they were last read, and not read since ({since})"
        return [f"{where}: {finite}, its {first.role} was not{more}"]
    if first.phase == FramePhase.LOSS:
        return [f"{where}: the tensor on which backward was called was {first.row.value}"]
    if first.phase == FramePhase.BACKWARD:
        line = f"{where}: {first.row.role} of {seen} is the first gradient that was not finite"
        if first.source == "outside":
            return [line, f"the model returned what {seen} had returned: its gradient comes from outside the model"]
        if first.between is not None:
            return [line + (f"; that of `{first.between[0]}` was finite before" if first.between[0] else "")]
        if first.role == first.row.role:
            return [line, f"the gradient of what {seen} returned was finite"]
        if first.makers.excluded:
            others = "; ".join(first.makers.excluded[:_MAX_LINES])
            return [line, f"the gradient of what {first.place} returned was finite; {_EXCLUDED}: {others}"]
        used = "received" if first.makers.own_code else "alone used"
        return [line, f"{first.place} {used} that tensor, and the gradient of its own output was finite"]
    if first.phase == FramePhase.OPTIMIZER and parse_role(first.row.role).kind is RoleKind.STATE:
        return [f"{where}: {first.row.role} of {seen} was not finite after the step"]
    if first.phase == FramePhase.OPTIMIZER:
        return [f"{where}: the weight and its gradient were finite before the step, the weight was not after it"]
    return []


def _of_weight(first: LocalDiagnosis, odd: OddWeight | None) -> list[str]:
    if odd is None:
        return []
    mine = "not finite" if not odd.row.finite else f"abs max {number_text(odd.row.abs_max)}"
    return [
        f"this rank's copy of the weight differs from that of {ranks_text(odd.ranks)}: {odd.row.role} of "
        f"{odd.place} is {mine}, theirs has abs max {number_text(odd.others.abs_max)}",
        f"{odd.compared} other weight{'s' if odd.compared != 1 else ''} of that step agree"
        f"{'s' if odd.compared == 1 else ''} between the ranks",
        f"the copies agreed in batch {odd.agreed_in}, so one of them has changed on its own since"
        if odd.agreed_in is not None
        else "no earlier batch was received, so it is unknown when they began to differ",
        *_of_step(odd),
    ]


def _of_step(odd: OddWeight) -> list[str]:
    if odd.changed:
        return ["it differs from what its last step left, on this rank alone"]
    if odd.gradient is None:
        return []
    size = number_text(odd.gradient) if math.isfinite(odd.gradient) else "not finite"
    made = "no step turns it into that number" if odd.untrained else "a step on this rank alone can have made it"
    return [f"its gradient in the batch before: abs max {size}; {made}"]


def large_weight(page: KeptPage, until: int) -> tuple[str, str] | None:
    """(place, abs max) of the largest finite weight in the frames up to `until`; None if all are of ordinary size."""
    rows = [(frame, row) for frame in page.frames if frame.index <= until for row in frame.weights]
    known = [(row.abs_max, frame, row) for frame, row in rows if row.abs_max is not None and math.isfinite(row.abs_max)]
    if not known:
        return None
    size, frame, row = max(known, key=lambda entry: entry[0])
    if size < WILD:
        return None
    return f"{row.role} of {module_text(frame.module, frame.cls)}", number_text(size)


def number_of_ranks(facts: RunFacts, attempt: int) -> int:
    """How many ranks an attempt has: those that were heard, and those that the nodes have announced."""
    return max(facts.announced_ranks, len(facts.of_attempt(attempt)))


def of_concurrent(first: LocalDiagnosis, concurrent: list[LocalDiagnosis], ranks: int = 0) -> list[str]:
    """A line about origins that nothing puts in order. `ranks` is how many ranks there are in all."""
    if not concurrent:
        return []
    who = ranks_text([other.rank for other in concurrent])
    lines = [f"{who}: a separate origin between the same two collectives; nothing puts them in order"]
    apart = [other for other in concurrent if is_alike(first, other) and other.batch != first.batch]
    for other in apart[:_MAX_LINES]:
        lines.append(f"{rank_name(other.rank)} numbers that batch {other.batch}: it ran extra batches, or skipped some")
    if all(is_alike(first, other) for other in concurrent) and len(concurrent) + 1 == ranks:
        lines.append("all ranks met the same value in the same place: look at what they share, and not at one rank")
    return lines


def _of_stages(facts: RunFacts, first: LocalDiagnosis) -> list[str]:
    """Where ranks run different models, a gradient from outside of the model may come from the next stage."""
    mine = page_of(facts, first)
    others = [rank.rank for rank in facts.of_attempt(first.attempt) if rank.rank != first.rank]
    same = [number for number, page in peers(facts, first).items() if run_the_same_model(mine, page)]
    if len(same) == len(others):
        return []
    return ["it is unknown whether the other ranks run the same model: another stage may have sent that gradient"]


def missing_ranks(facts: RunFacts, attempt: int) -> list[str]:
    """Lines about nodes and ranks that were never heard."""
    expected = max((hello.min_nodes for hello in facts.hellos), default=1)
    nodes, ranks = expected - len(facts.hellos), facts.announced_ranks - len(facts.of_attempt(attempt))
    found, _ = unheard_nodes(facts)
    if not found and nodes > 0:
        found = [f"{nodes} of {expected} nodes were never heard from"]
    return (
        [*found, f"{counted(ranks, 'rank')} {'was' if ranks == 1 else 'were'} never heard from"] if ranks > 0 else found
    )


def _unsettled(facts: RunFacts, first: LocalDiagnosis, diagnoses: list[LocalDiagnosis]) -> list[str]:
    reasons = missing_ranks(facts, first.attempt)
    ranks = facts.of_attempt(first.attempt)
    heard = {diagnosis.rank for diagnosis in diagnoses} | set(clean_peers(facts, first))
    # What a rank was handed could have been handed to all. There only a clean page of the same point clears a peer.
    if first.source not in ("weight", "unread", "carried"):
        heard |= {rank.rank for rank in ranks if rank.exit is not None}
    unheard = [rank.rank for rank in ranks if rank.rank not in heard]
    if unheard:
        reasons.append(f"{ranks_text(unheard)}: no frames of that step were received, so the same may be true there")
    return reasons


def _of_clean(facts: RunFacts, first: LocalDiagnosis) -> list[str]:
    clean, pages = clean_peers(facts, first), peers(facts, first)
    same = [number for number in clean if pages[number].batch == first.batch]
    lines = [f"{ranks_text(same)}: every frame received of that batch was finite"] if same else []
    apart = [number for number in clean if number not in same][:_MAX_LINES]
    return lines + [
        f"rank {number}: every frame received of its batch {pages[number].batch}, of the same step, was finite"
        for number in apart
    ]


def clean_peers(facts: RunFacts, first: LocalDiagnosis) -> list[int]:
    """The ranks whose page of the same point holds no alarm and no non-finite gradient for a GradScaler."""
    clean = []
    for number, page in peers(facts, first).items():
        frames = sorted(page.suspicious_frames, key=lambda frame: frame.index)
        if page.num_frames > 0 and first_alarm(frames) is None and first_expected_gradient(frames) is None:
            clean.append(number)
    return clean
