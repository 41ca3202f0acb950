"""Remarks on parts of a model that do not learn while the others do. Pure.

Each is told only if every rank that stepped has seen it: on one rank's share of the data alone, it may be the data.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy

from ...core.codes import Code
from ...core.events.agent_events import StoppedGradient, UnmovedParts
from ...core.frames import module_text
from ..facts.diagnosis import number_text
from ..facts.rank_facts import RankFacts
from ..report.run_figures import RunInsight
from ..report.sentence_parts import modules_text, where_text
from .step_remarks import hash_tables, stepped_ranks

_MOST_TOLD = 3
_DEAD = (
    "Look at what made the outputs of {before} this large and of one sign: a step that was too large (learning rate, "
    "warmup, clipping), its bias or its inputs. If it was so from the first batch on, look at the initialisation."
)
_SATURATED = (
    "Look at how large the outputs of {before} are: beyond some size {activation} is flat (a norm in front, a smaller "
    "initialisation, a smaller step), and a softmax over one element always is."
)
_UNMOVED = (
    "Look at the learning rate of their group in the optimizer (0, or too small for the weights' dtype). If they are "
    "not meant to train, freeze them: requires_grad_(False)."
)


def gradients_stopped(ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """A gradient reaches an activation and none passes: dead if that returns nothing but zeros, else saturated."""
    found = {rank.rank: {each.module: each for each in rank.stopped_gradients} for rank in stepped_ranks(ranks)}
    if not found:
        return
    shared = set.intersection(*(set(told) for told in found.values()))
    everyone = [rank.rank for rank in ranks]
    one_rank = min(found)
    for module in [each for each in found[one_rank] if each in shared][:_MOST_TOLD]:
        seen = {number: told[module] for number, told in found.items()}
        one = min(seen.values(), key=lambda each: each.batches)
        is_dead = all(each.most == 0 for each in seen.values())
        where = where_text(found, everyone)
        before = module_text(one.module, one.cls)
        activation = module_text(one.activation, one.activation_cls) if one.activation_cls else "what lies between"
        text = _stopped_text(one, where, is_dead=is_dead)
        mend = (_DEAD if is_dead else _SATURATED).format(before=before, activation=activation)
        code = Code.DEAD_ACTIVATION if is_dead else Code.GRADIENT_STOPPED
        named = [name for name in (one.activation, one.module) if name]
        yield RunInsight.of(code, text, mend, found, named, min(each.where.batch for each in seen.values()))


def _stopped_text(stopped: StoppedGradient, where: str, *, is_dead: bool) -> str:
    before = module_text(stopped.module, stopped.cls)
    seen = f"{where} in each of the last {stopped.batches} batches that were read (batch {stopped.where.batch} to "
    seen += f"{stopped.last})"
    arrived = f"a gradient of up to {number_text(stopped.arrived)} reaches it and none passes"
    outcome = f"so the weights of {before}, whose outputs are up to {number_text(stopped.given)}, get exactly 0"
    if not stopped.activation_cls:
        behind = module_text(stopped.behind, stopped.behind_cls)
        handed = f"{behind} was handed nothing but zeros {seen}, made between {before} and it"
        outputs = f"outputs up to {number_text(stopped.given)}"
        return f"{handed}: the weights of {before} ({outputs}) get a gradient of exactly 0"
    activation = module_text(stopped.activation, stopped.activation_cls)
    if is_dead:
        return f"{activation} returned nothing but zeros {seen}: {arrived}, {outcome}"
    returned = f"it returned {number_text(stopped.least)} to {number_text(stopped.most)} in size"
    return f"{activation} stopped the gradient {seen}: {returned}, {arrived}, {outcome}"


def parts_unmoved(ranks: list[RankFacts]) -> Iterator[RunInsight]:
    """Weights that no step has moved, proven by their hashes, where the steps have moved others."""
    found = {rank.rank: rank for rank in stepped_ranks(ranks)}
    roots = {each.where.root for rank in found.values() for each in rank.unmoved_parts}
    for label in sorted(roots):
        told = {n: each for n, rank in found.items() for each in rank.unmoved_parts if each.where.root == label}
        if len(told) < len(found):
            continue
        first = told[min(told)]
        names = [
            name
            for name in first.names
            if all(name in each.names and _is_the_same(found[n], each, name) for n, each in told.items())
        ]
        if not names:
            continue
        one = min(told.values(), key=lambda each: each.batches)
        where = where_text(told, [rank.rank for rank in ranks])
        text = f"no step has moved {modules_text(names)} {where} in {one.batches} batches that were read (batch "
        text += f"{one.where.batch} to {one.last}), while {one.moved} other weights moved"
        if names[0] == one.names[0]:
            text += f": `{names[0]}` stays at abs max {number_text(one.abs_max)}, at a gradient of up to "
            text += number_text(one.gradient)
        text += ", and the hashes are the same"
        modules = [name.rpartition(".")[0] for name in names]
        yield RunInsight.of(Code.PARTS_UNMOVED, text, _UNMOVED, told, modules, one.where.batch)


def _is_the_same(rank: RankFacts, parts: UnmovedParts, name: str) -> bool:
    """Whether the hashes show that this weight has the same bits after at least as many steps as were read."""
    table, samples = hash_tables(rank, parts.where.root)
    places = [place for place, line in enumerate(table) if line.startswith(f"w {name} ")]
    if len(places) != 1 or len(samples) < 2:
        return False
    steps = [each.where.step for each in samples]
    hashes = {numpy.frombuffer(each.hashes, "<u4")[places[0]].item() for each in samples}
    return len(hashes) == 1 and max(steps) - min(steps) >= parts.batches
