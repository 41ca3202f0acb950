"""The words of an overflow verdict: its place and its sentence."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

from ...core.bad_values import NAMED_BY_SCRIPT
from ...core.events.alarm_evidence import BadOperation, PossibleLine, SecondRun, operation_text
from ...core.frames import LOSS_CLASS, FramePhase, module_text
from ...core.identity import is_rank
from ...core.marked_line import CODE_WIDTH, shown_line
from ...core.roles import RoleKind, parse_role
from ...core.text import joined
from ..facts.diagnosis import LocalDiagnosis, quoted
from ..facts.replicas import OddWeight
from ..facts.run_facts import RunFacts
from ..facts.words import between_text
from ..report.sentence_parts import one_on, ranks_text
from ..report.verdict import OverflowFields

_MOST_NAMED = 4
NOBODY_LOOKED = "its weights were not checked"


def is_of_no_module(first: LocalDiagnosis) -> bool:
    """Whether it is a tensor outside of all modules that the script has handed to detect_overflow."""
    return first.source == "unread" and first.cls == NAMED_BY_SCRIPT


def sentence(
    first: LocalDiagnosis,
    host: str,
    concurrent: list[LocalDiagnosis],
    odd: OddWeight | None,
    ranks: int,
    variable: str = "",
) -> str:
    """The statement of a verdict that names a rank. `ranks` is how many ranks there are in all.

    `variable`: the script's, in which a loss was bad first: a clause.
    """
    alike = [other.rank for other in concurrent if is_alike(first, other)]
    others = [other.rank for other in concurrent if other.rank not in alike]
    who, verb = one_on(first.rank, host), "overflowed" if concurrent else "overflowed first"
    if alike:
        verb = "overflowed alike"
        are_all = len(alike) + 1 == ranks and all(map(is_rank, [first.rank, *alike]))
        everyone = f"All {ranks} ranks" if ranks > 2 else "Both ranks"
        who = everyone if are_all else ranks_text([first.rank, *alike]).capitalize()
    text = _what(first, who, verb, odd, plural=bool(alike))
    if variable:
        text += f"; {variable}"
    if others:
        text += f"; concurrently, {ranks_text(others)} met a non-finite value elsewhere"
    if first.mask.text:
        text += f"; {first.mask.text}"
    elif first.mask.turned is not None:
        text += f"; {module_text(*first.mask.turned)} turned it into nan"
    if first.cause:
        text += f" ({first.cause})"
    return f"{text}."


def is_alike(first: LocalDiagnosis, other: LocalDiagnosis) -> bool:
    """Whether two ranks met the same value in the same place, at the same point of the training."""
    # each rank numbers its own batches: where rank 0 alone evaluates, the step and the collectives are the same
    same_count = first.issued.seq == other.issued.seq >= 0 and first.issued.clock == other.issued.clock
    same_place = first.step == other.step and same_count
    same_point = first.batch == other.batch or same_place
    return same_point and _spot(first) == _spot(other)


def _spot(one: LocalDiagnosis) -> tuple[object, ...]:
    return one.module, one.cls, one.own_role, one.row.value, one.phase, one.source, one.between


_SENTENCES = {
    "changed": "{had} after the step of {batch}; it was changed outside of forward, backward and step: {history}",
    "carried": "{who} handed {value} to {module} ({role}) in {batch}; the record does not show where it was made",
    "left": "{had} before the backward of {batch} began: an earlier backward, or the script, left it in .grad",
    "unread": f"{{had}} in {{batch}}, out of finite inputs; {NOBODY_LOOKED}",
}
"""Source -> the statement, where that alone tells what happened."""


def _what(first: LocalDiagnosis, who: str, verb: str, odd: OddWeight | None, *, plural: bool = False) -> str:
    batch, module = batch_text(first), first.place
    lead, had = f"{who} {verb}: ", f"{who} had {first.row.value} in the {first.role} of {module}"
    if first.source == "weight":
        return _of_weight(first, who, odd, had)
    if first.source == "buffer":
        name = f"{first.module}.{parse_role(first.role).name}".removeprefix(".")
        return f"{who}: buffer `{name}` was not finite before {batch}'s forward ({first.row.value})"
    if is_of_no_module(first):
        return f"{who} had {first.row.value} in {quoted(first.module)}, which detect_overflow was given in {batch}"
    if first.source in _SENTENCES:
        history = first.weight.history or "that step's update rule cannot have made it"
        return _SENTENCES[first.source].format(
            had=had, who=who, batch=batch, value=first.row.value, role=first.role, module=module, history=history
        )
    if first.phase == FramePhase.INPUT:
        fed = f"{'were' if plural else 'was'} fed {first.row.value}"
        return f"{who} {fed}: {first.role} of {module} in {batch} was bad before the model saw it"
    if first.phase == FramePhase.LOSS:
        when = f"after the forward of {batch}" if first.root != LOSS_CLASS else f"backward {batch.partition(' ')[2]}"
        return f"{lead}{first.row.value} in the loss, {when}"
    if first.phase == FramePhase.BACKWARD:
        return lead + _of_gradient(first, batch)
    if first.phase == FramePhase.OPTIMIZER:
        return _of_step(first, who, lead, had)
    again = ", when it was run again for the backward" if first.row.phase == FramePhase.RECOMPUTE else ""
    if first.mask.turned is not None and not first.mask.text:
        lead = f"{who} met nan that came from an expected -inf: "
    if first.makers.own_code:
        own = joined([f"of {name}" for name in _named(first.makers.own_code, "modules")], "or")
        seen = f"{first.row.role} of {first.row.place}"
        return f"{lead}{first.row.value} in {seen}, made by code {own} itself, forward, {batch}{again}"
    if first.between is not None:
        stretch = between_text(first.between)
        return f"{lead}{first.row.value} in {module}'s own forward, {stretch}, {batch}{again}"
    return f"{lead}{first.row.value} in the {first.role} of {module}, forward, {batch}{again}"


def _named(modules: Sequence[str], what: str) -> list[str]:
    """The names of the first modules, and how many more there are."""
    named, more = [quoted(module) for module in modules[:_MOST_NAMED]], len(modules) - _MOST_NAMED
    return [*named, f"one of {more} more {what}"] if more > 0 else named


def _of_step(first: LocalDiagnosis, who: str, lead: str, had: str) -> str:
    role, batch = parse_role(first.role), batch_text(first)
    if role.kind is RoleKind.STATE:
        kept = f"{role.key} that the optimizer keeps in {first.row.dtype} for {role.name} of {first.place}"
        if first.sure:
            return f"{lead}the step after {batch} made {first.row.value} in the {kept}, from finite gradients"
        since = f"; {first.weight.history}" if first.weight.history else ""
        return f"{who} had {first.row.value} in the {kept} after the step of {batch}{since}"
    if first.sure:
        made = f"{first.row.value} in the {first.role} of {first.place}"
        return f"{lead}the step after {batch} made {made}, from finite gradients"
    doubt = "the step made it, or something else changed the weight after the forward"
    return f"{had} after the step of {batch}, from finite gradients: {doubt}"


def _of_weight(first: LocalDiagnosis, who: str, odd: OddWeight | None, had: str) -> str:
    batch = batch_text(first)
    if odd is not None:
        made = "" if not odd.row.finite else f", which made {first.row.value}"
        flip = "a bit flip, " if odd.untrained else ""
        since = f": {flip}a different seed or checkpoint, or a missed broadcast, can explain that"
        if odd.agreed_in is not None:
            how = "a step on this rank alone, or code that changes it there"
            if odd.untrained:
                how = "a bit flip in its memory, or code that changes it on this rank alone"
            since = f", but agreed with them in batch {odd.agreed_in}: {how}"
        than = f"a different {first.role} of {first.place} than {ranks_text(odd.ranks)} in {batch}{made}"
        return f"{who} has {than}; this rank's copy differs from the others'{since}"
    if first.row.phase == FramePhase.OPTIMIZER:
        history = first.weight.history or "the gradient that went into that step was not read"
        return f"{had} after the step of {batch}; {history}"
    return f"{had} at the start of its forward in {batch}{f'; {first.weight.history}' if first.weight.history else ''}"


def _of_gradient(first: LocalDiagnosis, batch: str) -> str:
    seen = first.row.place
    gradient = f"{first.row.value} in the gradient of what {seen} returned"
    if first.row.role and parse_role(first.row.role).kind is not RoleKind.GRAD_OUTPUT:
        gradient = f"{first.row.value} in the {first.row.role} of {seen}"
    if first.source == "outside":
        return f"{gradient}, passed in from outside the model (the script's own loss), backward, {batch}"
    if first.between is not None:
        return f"{gradient}, made in {first.place}'s backward{_by(first)}, {batch}"
    own = " or ".join(map(_own_code_of, first.makers.own_code))
    also = f", or made by {own}, which may have used the same tensor" if own else ""
    return f"{first.row.value} in the {first.role} of {first.place}, backward, {batch}{also}"


def _by(first: LocalDiagnosis) -> str:
    """`, by `norm`, `act` or its own code`: what in the named module can have made a gradient; "" if unknown."""
    named = _named(first.makers.suspects, "calls")
    named += ["its own code"] if first.module in first.makers.own_code else []
    named += ["the sum of their gradients"] if first.row.value != "nan" and len(first.makers.suspects) > 1 else []
    outside = " or ".join(_own_code_of(name) for name in first.makers.own_code if name != first.module)
    else_ = f", or outside of it by {outside}" if outside else ""
    by = f", by {joined(named, 'or')}" if named else ""
    return by + else_


def _own_code_of(name: str) -> str:
    return f"code of `{name}` itself" if name else "the root module's own code"


def operation_lines(ran: SecondRun | None, operation: BadOperation | None, phase: str | None = None) -> list[str]:
    """What a second run has found, or why it has not: `scores = q @ k, model.py:87, aten.mm: ...`.

    `phase`: that of the diagnosis.
    """
    if ran is None:
        return []
    if operation is None:
        unknown = f"which operation made it is not known: {ran.unknown or 'in a second run another module made it'}"
        return [unknown, *_possible(ran.lines)]
    how = "; found by running the compiled code eagerly" if ran.eagerly else ""
    is_hidden = phase == FramePhase.BACKWARD and not operation.node
    how += "; the forward has hidden it (torch.where, a mask), and its backward has used it" if is_hidden else ""
    return [operation_text(operation) + how]


def _possible(lines: list[PossibleLine]) -> list[str]:
    """`what may have made it, ...: mul or exp, model.py:14, `g = (h * 30).exp()``; [] where that is not known."""
    if not lines:
        return []
    each = [
        f"{joined(line.ops, 'or')}, {PurePath(line.file).name}:{line.line}, `{shown_line(line.code, None, CODE_WIDTH)}`"
        for line in lines
    ]
    return [f"what may have made it, as the forward ran again with what was there by then: {'; '.join(each)}"]


def operation_of(first: LocalDiagnosis, ran: SecondRun | None) -> BadOperation | None:
    """The operation that a second run has found, if it ran in a module that the diagnosis names.

    One that made an -inf of finite numbers may be in front of the module that made nan of that.
    """
    if ran is None or ran.operation is None:
        return None
    name = ran.operation.module
    if first.phase == FramePhase.LOSS:
        return ran.operation if not name else None
    inside = not first.module or name == first.module or name.startswith(f"{first.module}.")
    listed = name in (*first.makers.own_code, *first.makers.suspects)
    return ran.operation if inside or listed or first.mask.text or first.mask.turned else None


def explain_command(
    facts: RunFacts,
    first: LocalDiagnosis,
    ran: SecondRun | None = None,
    *,
    of_sum: bool = False,
    went_on: bool = False,
    operation: BadOperation | None = None,
) -> list[str]:
    """The step that finds the line of a backward, or of a forward that could not run again, or what each rank has put
    into a sum: the run's own command with --explain. [] if that is of no use.

    `went_on`: the training did, so that nothing ran again. `operation`: what is known without its line.
    """
    words = next((hello.command for hello in facts.hellos), [])
    is_backward = first.phase in (FramePhase.BACKWARD, FramePhase.LOSS)
    launched, in_python = words[:2] == ["gpuwatch", "launch"], words[:1] == ["gpuwatch.watch"]
    if not (launched or in_python) or not (ran is not None or is_backward or of_sum or went_on):
        return []
    options, rest = {"--explain": str(first.batch)}, words[2:]
    if ("--explain", options["--explain"]) in pairwise(rest):
        return []
    if not of_sum:
        options["--rank"] = str(first.rank)
    for option in ("--explain", "--rank") if "--explain" in rest[:-1] else ():  # else --rank is the script's own
        at = rest.index(option) if option in rest[:-1] else len(rest)
        rest = [*rest[:at], *rest[at + 2 :]]
    command = shlex.join([*words[:2], *(word for pair in options.items() for word in pair), *rest])
    what = "the operation and its line" if operation is None else "the line of this operation"
    if first.phase == FramePhase.BACKWARD:
        what = "the line of the forward whose backward made it"
    if of_sum:
        what = "each rank's own number at the first bad element"
    again = f"with that batch watched: {command}" if launched else f"with --explain {first.batch}."
    return [f"For {what}, run it again {again}"]


def batch_text(first: LocalDiagnosis) -> str:
    """`batch 7 (step 5)`; without the step where that is the same number."""
    return f"batch {first.batch}" + (f" (step {first.step})" if first.step != first.batch else "")


def place_of(first: LocalDiagnosis) -> OverflowFields:
    """The place of a diagnosis, for a verdict."""
    return {
        "module": first.module,
        "cls": first.cls,
        "root": first.root,
        "phase": first.phase,
        "role": first.own_role,
        "value": first.row.value,
        "dtype": first.row.dtype,
        "attempt": first.attempt,
        "step": first.step,
        "batch": first.batch,
        "seen_in": first.shown_by,
    }


def place_in_collective(met: LocalDiagnosis) -> OverflowFields:
    """The place of a value that a collective has brought: in no module."""
    nowhere: OverflowFields = {"module": None, "cls": None, "role": None, "root": None}
    return place_of(met) | nowhere | {"phase": FramePhase.COLLECTIVE}
