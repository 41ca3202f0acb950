"""The cause that the training is: it diverged, one step made a weight large, or it began with one. Replicas, too."""

from __future__ import annotations

import math

import msgspec

from ...core.codes import Certainty
from ..facts.diagnosis import number_text
from ..facts.growth import ModuleGrowth, growth_of
from ..facts.replicas import OddWeight, page_of
from ..facts.weight_history import UNSEEN
from ..facts.weight_jumps import WeightJump, weight_jumps
from ..report.sentence_parts import ranks_text
from ..report.verdict import OverflowCause
from .cause_clues import CauseClues
from .data_cause import handed_root

_E, _S = Certainty.ESTABLISHED, Certainty.SUPPORTED
_DIVERGED = 2
"""Batches in a row in which outputs grow, for a training that diverges. One alone is one step."""
_LARGE = 100.0
"""abs max that weights of a healthy training do not have."""


def of_growth(clues: CauseClues) -> OverflowCause | None:
    """Outputs that ran away on all ranks alike, over several batches."""
    return _diverged(clues, _grown(clues))


def _grown(clues: CauseClues) -> ModuleGrowth | None:
    """None without a large weight: it may be what the model is handed that grows."""
    grown = growth_of(clues.facts, clues.first)
    is_alike = grown is not None and (grown.alike or not grown.unlike)
    return grown if is_alike and _largest_weight(clues) > _LARGE else None


def _largest_weight(clues: CauseClues) -> float:
    """abs max over all weights that the page shows as finite."""
    page = page_of(clues.facts, clues.first)
    rows = page.weights().values() if page is not None else ()
    return max((row.abs_max for row in rows if row.finite and row.abs_max is not None), default=0.0)


def of_training(clues: CauseClues) -> OverflowCause | None:
    """Outputs that ran away on all ranks alike, over several batches or with one step."""
    first, grown = clues.first, _grown(clues)
    if (diverged := _diverged(clues, grown)) is not None:
        return diverged
    if clues.wild is not None and clues.wild.against.rpartition(" in ")[2].startswith("batch"):
        wild = clues.wild
        return OverflowCause(
            "step",
            _S,
            f"{wild.name} has abs max {number_text(wild.row.abs_max)}, against {wild.against}: one step, or the "
            f"script, has made it large{_by_optimizer(clues)}",
            [
                f"Look at what made {wild.name} large: the gradient of the step before (clip_grad_norm_), "
                "the learning rate, a copy or a load by the script. None of these was tried."
            ],
        )
    if grown is not None and grown.alike and not grown.is_loss and first.step > 0:
        return _one_step(clues, grown)
    return None


def _diverged(clues: CauseClues, grown: ModuleGrowth | None) -> OverflowCause | None:
    if grown is None or grown.steps < _DIVERGED:
        return None
    ranks, began = sorted([clues.first.rank, *grown.alike]), grown.batches[1]
    # the growth of one module may come from a weight that jumped in the batch before: its gradient did
    looked = weight_jumps(clues.facts, clues.first, ranks, range(max(1, began - 1), began + 1))
    if looked.first is not None:
        return _jumped(grown, looked.first)
    rate = _optimizer(clues)
    lower = f" ({rate[1]:g})" if rate is not None else ""
    ran = "the training diverged" if looked.whole else "outputs ran away"
    unkept = f"; it is unknown whether a step began it: not all frames before batch {began} are kept"
    return OverflowCause(
        "divergence",
        _S,
        f"{ran} on {ranks_text(ranks)} from batch {began} on: {_went(grown)}, "
        f"the largest weight is {number_text(_largest_weight(clues))}"
        f"{_by_optimizer(clues)}{'' if looked.whole else unkept}",
        [
            f"Lower the learning rate{lower}, warm it up, or clip the gradients (clip_grad_norm_); and look at what "
            f"changed in batch {began}: a schedule, a checkpoint, an unfrozen part. None of these was tried."
        ],
    )


def _jumped(grown: ModuleGrowth, jump: WeightJump) -> OverflowCause:
    """Something else than a step has made a weight large, and the training went on with it."""
    alone = " alone" if jump.others else ""
    return OverflowCause(
        "replica" if jump.others else "step",
        _S,
        f"{jump.name} had abs max {number_text(jump.left)} after the step of batch {jump.batch - 1}, and "
        f"{number_text(jump.found)} in the forward of batch {jump.batch}, on {ranks_text(jump.ranks)}{alone}: "
        f"{UNSEEN}; the training ran away with it: {_went(grown)}",
        [
            f"Look at what the script does with {jump.name} between the step of batch {jump.batch - 1} and the forward "
            f"of batch {jump.batch}: a copy, a load, an operation on its data. None of these was tried."
        ],
    )


def _went(grown: ModuleGrowth) -> str:
    batches, sizes = grown.shown
    went = ", ".join(map(number_text, sizes))
    return f"abs max of {grown.text} went {went} in batches {batches[0]} to {batches[-1]}"


def _one_step(clues: CauseClues, grown: ModuleGrowth) -> OverflowCause:
    batches, sizes = grown.shown
    where = f"on {ranks_text(sorted([clues.first.rank, *grown.alike]))}"
    return OverflowCause(
        "step",
        _S,
        f"{grown.text} went from abs max {number_text(sizes[-2])} in batch "
        f"{batches[-2]} to {number_text(sizes[-1])} in batch {batches[-1]} {where} alike: one step has made its "
        f"weights large{_by_optimizer(clues)}",
        [
            f"Look at the step after batch {batches[-2]}: clip its gradients (clip_grad_norm_), or lower the learning "
            "rate. Neither was tried."
        ],
    )


def _optimizer(clues: CauseClues) -> tuple[str, float] | None:
    """(name, learning rate) of the last optimizer that stepped."""
    rank = clues.facts.one(clues.first.attempt, clues.first.rank)
    last = next((each.again.optimizer for each in rank.anomalies if each.again is not None), None)
    if last is None or "lr" not in last.settings:
        return None
    return last.cls.rpartition(".")[2], last.settings["lr"]


def _by_optimizer(clues: CauseClues) -> str:
    known = _optimizer(clues)
    return f", with {known[0]} at learning rate {known[1]:g}" if known is not None else ""


def of_start(clues: CauseClues) -> OverflowCause | None:
    """A weight that was very large before the first step, and that the operation was handed."""
    if clues.large is None or clues.operation is None or clues.first.step > 0:
        return None
    place, size = clues.large
    handed = [each.abs_max for each in clues.operation.inputs if each.abs_max is not None]
    # a module before has multiplied its ordinary input by the weight
    is_of_weight = max(handed, default=0.0) > _LARGE > max(handed_root(clues).values(), default=math.inf)
    if size not in map(number_text, handed) and not is_of_weight:
        return None
    return OverflowCause(
        "start",
        _S,
        f"the {place} has abs max {size}, and no optimizer step was seen before it",
        [f"Look at the initialisation of the {place}: torch.empty, to_empty(), a checkpoint. Not tried."],
    )


def growing(clues: CauseClues, cause: OverflowCause | None) -> OverflowCause | None:
    """A number that is too large for its dtype now, of outputs that grow from batch to batch: another dtype has room
    for a few batches more. So it is not established that the dtype is the cause."""
    grown = growth_of(clues.facts, clues.first) if cause is not None else None
    if cause is None or grown is None:
        return cause
    return msgspec.structs.replace(
        cause,
        certainty=_S,
        statement=f"{cause.statement}; {_went(grown)}{_by_optimizer(clues)}",
        next=[*cause.next, "And look at why the outputs grow: the learning rate, or a step before. Not tried."],
    )


def of_copy(odd: OddWeight) -> OverflowCause:
    """One rank's copy of a weight differs from the others."""
    mine = "is not finite" if not odd.row.finite else f"has abs max {number_text(odd.row.abs_max)}"
    theirs = f"abs max {number_text(odd.others.abs_max)}"
    statement = f"{odd.row.role} of this rank's copy {mine}, that of {ranks_text(odd.ranks)} has {theirs}"
    return OverflowCause("replica", _E, statement, _steps_for_copy(odd))


def of_earlier_copy(clues: CauseClues) -> OverflowCause | None:
    """Likewise, of a weight whose module was called before the one that shows the value."""
    odd = clues.earlier
    if odd is None:
        return None
    mine = "is not finite" if not odd.row.finite else f"has abs max {number_text(odd.row.abs_max)}"
    agreed = f", and agreed in batch {odd.agreed_in}" if odd.agreed_in is not None else ""
    statement = (
        f"{odd.row.role} of {odd.place} {mine} on rank {clues.first.rank} alone, against "
        f"{number_text(odd.others.abs_max)} on {ranks_text(odd.ranks)}{agreed}"
    )
    return OverflowCause("replica", _S, statement, _steps_for_copy(odd))


def _steps_for_copy(odd: OddWeight) -> list[str]:
    memory = (
        "the node's memory checks (nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg for Xid or machine checks), "
        "and leave it out of the next run if it happens again."
    )
    if odd.agreed_in is not None and odd.untrained:
        return [f"If no code of the script changes that weight on this rank alone, run {memory}"]
    if odd.agreed_in is not None:
        alone = "a gradient that is not reduced, a learning rate, a copy"
        return [f"Look at what trains or changes that weight on this rank alone: {alone}."]
    start = "Check whether every rank starts from the same seed and checkpoint"
    return [
        f"{start}; --trace-batches 0,1 shows whether they began alike.",
        *([f"If they started equal, run {memory}"] if odd.untrained else []),
    ]
