"""Remarks on optimizer steps that trained nothing: all gradients were zero, or no weight has moved. Pure.

Nothing here is inf or nan, so no verdict speaks of it. Both are told only if each rank that stepped has seen it: the
shard of one rank alone may well have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy

from ...core.codes import Code
from ...core.events.across_ranks import ReplicaHashes
from ...core.events.agent_events import UnmovedWeights, ZeroedGradients
from ...core.frames import module_text
from ...core.values import DTYPE_MAX
from ..facts.diagnosis import number_text
from ..facts.rank_facts import RankFacts
from ..report.run_figures import RunInsight
from ..report.sentence_parts import counted, where_text

_BY_NORM = (
    "Find what makes gradients this large, compute their norm in {}, and let `clip_grad_norm_` raise where it is inf: "
    "error_if_nonfinite=True."
)
_BY_SCRIPT = (
    "Look at what runs between the backward and the step: a clip by a norm that was inf or with max_norm=0, "
    "`zero_grad()`, a hook."
)
_OF_A_COPY = (
    "Give the optimizer the parameters of the model that is called: it may have those from before the model was "
    "copied, loaded or wrapped."
)
_TOO_SMALL = (
    "Look at the learning rate (0, or too small for the dtype of the weights), and at what the script writes into them."
)


def gradients_zeroed(ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """The optimizer got nothing but zeros, where the backward had made finite gradients that are not zero."""
    found = {rank.rank: rank.zeroed_gradients for rank in stepped_ranks(ranks)}
    if not found or not all(found.values()):
        return
    number, most = max(((rank, each) for rank in found for each in found[rank]), key=lambda entry: entry[1].batches)
    where = where_text(found, [rank.rank for rank in ranks])
    since = min(each.where.batch for each in found[number])
    when = f"batch {since}" if most.batches == 1 else f"batch {since} the first, batch {most.last} the last"
    batches = f"in {most.batches} of the {most.of} batch{'es' if most.of > 1 else ''} that were read"
    text = f"every gradient that the optimizer got was zero {where} {batches} ({when}), while those that the backward "
    text += f"had made were finite, up to {number_text(most.abs_max)} in {most.role} of "
    text += module_text(most.module, most.cls)
    cause, mend = _cause(most)
    yield RunInsight.of(Code.GRADIENTS_ZEROED, text + cause, mend, found, [most.module], since)


def _cause(zeroed: ZeroedGradients) -> tuple[str, str]:
    """(the sentence's end, what to do)"""
    limit = _norm_limit(zeroed.dtype)
    if zeroed.is_scaled or zeroed.norm_most <= limit:  # of scaled ones the norm is not known
        return "", _BY_SCRIPT
    is_inf = "is" if zeroed.norm_least > limit else "may be"
    wider = "float32" if zeroed.dtype == "float16" else "float64"
    cause = f": their norm {is_inf} inf in {zeroed.dtype}, and a clip by a norm that is inf sets all gradients to 0"
    return cause, _BY_NORM.format(wider)


def _norm_limit(dtype: str) -> float:
    """From where on the norm of tensors of this dtype is inf.

    torch adds the squares of float16 up in float32, and those of the others in their own range.
    """
    largest = DTYPE_MAX.get(dtype, math.inf)
    return largest if dtype == "float16" else math.sqrt(largest)


def weights_unmoved(ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """All weights of a root had the same numbers over many steps, with gradients that were not zero."""
    if any(rank.loose_parameters for rank in ranks):
        return  # it trains tensors of its own through a model that is not meant to move
    found = {rank.rank: rank for rank in stepped_ranks(ranks)}
    roots = {each.where.root for rank in found.values() for each in rank.unmoved_weights}
    for label in sorted(roots):
        told = {n: each for n, rank in found.items() for each in rank.unmoved_weights if each.where.root == label}
        same = {n: _hashes_are_same(found[n], told[n]) for n in told}
        if len(told) < len(found) or False in same.values():
            continue
        one = min(told.values(), key=lambda each: each.steps)
        where = where_text(told, [rank.rank for rank in ranks])
        text = _unmoved_text(one, where, is_proven=all(same.values()))
        mend = _TOO_SMALL if one.is_stepped else _OF_A_COPY
        yield RunInsight.of(Code.WEIGHTS_UNMOVED, text, mend, told, [one.module], one.where.batch)


def _unmoved_text(unmoved: UnmovedWeights, where: str, *, is_proven: bool) -> str:
    read = f"{unmoved.steps} steps" if unmoved.steps == unmoved.of else f"{unmoved.steps} of {unmoved.of} steps"
    largest = f"up to {number_text(unmoved.abs_max)} in {unmoved.role} of {module_text(unmoved.module, unmoved.cls)}"
    numbers = f"abs max and abs min of all {counted(unmoved.weights, 'weight')} with a gradient"
    seen = f"{where}: {numbers} are the same after each of {read} ({largest})"
    ending = "" if unmoved.is_stepped else "; the optimizer that steps has none of them"
    if is_proven:
        return f"no step has moved a weight of {unmoved.where.root} {seen}, and so are their hashes{ending}"
    return f"the weights of {unmoved.where.root} look unmoved {seen}{ending}"


def _hashes_are_same(rank: RankFacts, unmoved: UnmovedWeights) -> bool | None:
    """Whether the weights of a root have the same bits now as at first; None if they were not hashed.

    Ranks hash them where there is a process group (worker/record/root_tensors.py).
    """
    table, samples = hash_tables(rank, unmoved.where.root)
    weights = [place for place, line in enumerate(table) if line.startswith("w ")]
    if len(weights) < unmoved.weights or len(samples) < 2:
        return None
    hashes = numpy.stack([numpy.frombuffer(each.hashes, "<u4")[weights] for each in samples])
    if (hashes != hashes[0]).any():
        return False
    steps = [each.where.step for each in samples]
    return True if max(steps) - min(steps) >= unmoved.steps else None


def hash_tables(rank: RankFacts, root: str) -> tuple[list[str], list[ReplicaHashes]]:
    """(what was hashed of a root, the hashes over the steps); nothing if that has changed."""
    of_root = [each for each in rank.hashes if each.where.root == root]
    if len({each.table for each in of_root}) > 1:
        return [], []
    table = next((each.tensors for each in of_root if each.tensors), [])
    return table, [each for each in of_root if len(each.hashes) == 4 * len(table)]


def stepped_ranks(ranks: list[RankFacts]) -> list[RankFacts]:
    """The ranks whose optimizer has stepped."""
    return [rank for rank in ranks if rank.counts.step > 0]
