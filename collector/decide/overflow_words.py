"""What a verdict about an overflow says: its place and its sentence."""

from __future__ import annotations

from typing import Any

from ...core.frames import FramePhase, module_text
from ...core.identity import is_rank, pid_of_number
from ...core.roles import RoleKind, parse_role
from ...core.verdicts import VerdictKind
from ..facts.diagnosis import LocalDiagnosis
from ..facts.facts import RunFacts
from ..report.model import Verdict
from ..report.sentence_parts import one_on, ranks_text
from .passed_values import ValueArrival, way_text
from .replicas import OddWeight
from .words import between_text, device_of, found_text, place_of, seen_in

_MOST_NAMED = 4
_SHARED = ("module", "cls", "root", "phase", "value", "dtype", "attempt", "step", "batch")
_NOT_BY_RULE = "that step's rule cannot have made it"
_UNREAD = "whether its weights were finite, nobody has looked"


def sentence(
    first: LocalDiagnosis, host: str, concurrent: list[LocalDiagnosis], odd: OddWeight | None, ranks: int
) -> str:
    """The statement of a verdict that names a rank. `ranks` is how many ranks there are in all."""
    alike = [other.rank for other in concurrent if is_alike(first, other)]
    others = [other.rank for other in concurrent if other.rank not in alike]
    who, verb = one_on(first.rank, host), "overflowed" if concurrent else "overflowed first"
    if alike:
        verb = "overflowed alike"
        are_all = len(alike) + 1 == ranks and all(map(is_rank, [first.rank, *alike]))
        who = f"All {ranks} ranks" if are_all else ranks_text([first.rank, *alike]).capitalize()
    text = _what(first, who, verb, odd, plural=bool(alike))
    if others:
        text += f"; concurrently, {ranks_text(others)} met a non-finite value elsewhere"
    if first.mask:
        text += f"; {first.mask}"
    elif first.turned is not None:
        text += f"; {module_text(*first.turned)} turned it into nan"
    if first.cause:
        text += f" ({first.cause})"
    return f"{text}."


def is_alike(first: LocalDiagnosis, other: LocalDiagnosis) -> bool:
    """Whether two ranks met the same value in the same place, at the same point of the training."""
    fields = ("module", "cls", "own_role", "value", "phase", "source", "between")
    return _is_same_point(first, other) and all(getattr(first, name) == getattr(other, name) for name in fields)


def _is_same_point(first: LocalDiagnosis, other: LocalDiagnosis) -> bool:
    """Each rank numbers its own batches: where rank 0 alone evaluates, the step and the collectives are the same."""
    if first.batch == other.batch:
        return True
    return first.step == other.step and first.seq == other.seq >= 0 and first.clock == other.clock


def _what(first: LocalDiagnosis, who: str, verb: str, odd: OddWeight | None, *, plural: bool = False) -> str:
    batch = _batch(first)
    module = place_of(first)
    lead = f"{who} {verb}: "
    if first.source == "weight":
        return _of_weight(first, who, odd)
    if first.source == "changed":
        return (
            f"{who} had {first.value} in the {first.role} of {module} after the step of {batch}; it was changed "
            f"outside of forward, backward and step: {first.history or _NOT_BY_RULE}"
        )
    if first.source == "carried":
        return f"{who} handed {first.value} to {module} ({first.role}) in {batch}; where it was made was not seen"
    if first.source == "left":
        return (
            f"{who} had {first.value} in the {first.role} of {module} before the backward of {batch} began: an earlier "
            "backward, or the script, has left it in .grad"
        )
    if first.source == "unread":
        return f"{who} had {first.value} in the {first.role} of {module} in {batch}, out of finite inputs; {_UNREAD}"
    if first.phase == FramePhase.INPUT:
        fed = f"{'were' if plural else 'was'} fed {first.value}"
        return f"{who} {fed}: {first.role} of {module} in {batch} was bad before the model saw it"
    if first.phase == FramePhase.BACKWARD:
        return lead + _of_gradient(first, batch)
    if first.phase == FramePhase.OPTIMIZER and parse_role(first.role).kind is RoleKind.STATE:
        return _of_state(first, who, lead)
    if first.phase == FramePhase.OPTIMIZER:
        if not first.sure:
            return (
                f"{who} had {first.value} in the {first.role} of {module} after the step of {batch}, from finite "
                "gradients: the step made it, or something else has changed the weight after the forward"
            )
        return f"{lead}the step after {batch} made {first.value} in the {first.role} of {module}, from finite gradients"
    again = ", when it was run again for the backward" if first.seen_in == FramePhase.RECOMPUTE else ""
    made = first.value
    if first.turned is not None and not first.mask:
        lead = f"{who} met nan that came from an expected -inf: "
    if first.own_code:
        named = [f"of `{name}`" if name else "of the root module" for name in first.own_code[:_MOST_NAMED]]
        if len(first.own_code) > _MOST_NAMED:
            named.append(f"of one of {len(first.own_code) - _MOST_NAMED} more modules")
        own = " or ".join(filter(None, (", ".join(named[:-1]), named[-1])))
        seen = module_text(first.at[0], first.at[1])
        return f"{lead}{made} in {first.at[2]} of {seen}, made by the own code {own}, forward, {batch}{again}"
    if first.between is not None:
        return f"{lead}{made} in {module}'s own forward, {between_text(first.between)}, {batch}{again}"
    return f"{lead}{made} in the {first.role} of {module}, forward, {batch}{again}"


def _of_state(first: LocalDiagnosis, who: str, lead: str) -> str:
    role = parse_role(first.role)
    kept, batch = f"{role.key} that the optimizer keeps in {first.dtype} of {role.name} of", _batch(first)
    if first.sure:
        return f"{lead}the step after {batch} made {first.value} in the {kept} {place_of(first)}, from finite gradients"
    since = f"; {first.history}" if first.history else ""
    return f"{who} had {first.value} in the {kept} {place_of(first)} after the step of {batch}{since}"


def _of_weight(first: LocalDiagnosis, who: str, odd: OddWeight | None) -> str:
    module, batch = place_of(first), _batch(first)
    if odd is not None:
        made = "" if not odd.row.finite else f", which made {first.value}"
        since = f", and agreed with them in batch {odd.agreed_in}" if odd.agreed_in is not None else ""
        if odd.untrained and odd.agreed_in is not None:
            since += ": a bit flip in its memory, or code that changes it on this rank alone"
        elif odd.agreed_in is not None:
            since += ": a step on this rank alone, or code that changes it there"
        else:
            flip = "a bit flip, " if odd.untrained else ""
            since += f": {flip}another seed or checkpoint, or a broadcast that did not happen can explain that"
        return (
            f"{who} has another {first.role} of {module} than {ranks_text(odd.ranks)} in {batch}{made}; "
            f"this rank's copy differs from the others'{since}"
        )
    if first.seen_in == FramePhase.OPTIMIZER:
        return (
            f"{who} had {first.value} in the {first.role} of {module} after the step of {batch}; "
            "the gradient that went into that step was not looked at"
        )
    since = f"; {first.history}" if first.history else ""
    return f"{who} had {first.value} in the {first.role} of {module} at the start of its forward in {batch}{since}"


def _of_gradient(first: LocalDiagnosis, batch: str) -> str:
    module = place_of(first)
    gradient = f"{first.value} in the gradient of what {module_text(first.at[0], first.at[1])} returned"
    if first.at[2] and parse_role(first.at[2]).kind is not RoleKind.GRAD_OUTPUT:
        gradient = f"{first.value} in the {first.at[2]} of {module_text(first.at[0], first.at[1])}"
    if first.source == "outside":
        return f"{gradient}, handed in from outside of the model (the script's own loss), backward, {batch}"
    if first.between is not None:
        return f"{gradient}, made in {module}'s backward{_by(first)}, {batch}"
    own = " or ".join(map(_own_code_of, first.own_code))
    also = f", or made by {own}, which may have used the same tensor" if own else ""
    return f"{first.value} in the {first.role} of {module}, backward, {batch}{also}"


def _by(first: LocalDiagnosis) -> str:
    """`, by `norm`, `act` or its own code`: what in the named module can have made a gradient; "" if unknown."""
    named = [f"`{name}`" if name else "the root module" for name in first.suspects[:_MOST_NAMED]]
    if len(first.suspects) > _MOST_NAMED:
        named.append(f"one of {len(first.suspects) - _MOST_NAMED} more calls")
    if first.module in first.own_code:
        named.append("its own code")
    if first.value != "nan" and len(first.suspects) > 1:
        named.append("the sum of their gradients")
    outside = " or ".join(_own_code_of(name) for name in first.own_code if name != first.module)
    else_ = f", or outside of it by {outside}" if outside else ""
    if not named:
        return else_
    return (f", by {', '.join(named[:-1])} or {named[-1]}" if len(named) > 1 else f", by {named[0]}") + else_


def _own_code_of(name: str) -> str:
    return f"the own code of `{name}`" if name else "the root module's own code"


def unknown_sentence(tier: list[LocalDiagnosis]) -> str:
    """The statement where several ranks met it and the first is unknown."""
    first = tier[0]
    who = ranks_text([f.rank for f in tier]).capitalize()
    cause = f" ({first.cause})" if first.cause and first.source != "skipped" else ""
    batch = f"batch {first.batch}"
    if first.source == "skipped":
        return f"{who} met {first.value} in {batch}, which was skipped ({first.cause}): where it came from is unknown."
    if first.source == "received":
        place = place_of(first)
        if first.between is not None and first.seen_in != FramePhase.BACKWARD:
            where = f"in {place}'s own forward, {between_text(first.between)}"
        elif first.seen_in == FramePhase.BACKWARD:
            where = f"in the backward of {place}"
        else:
            where = f"in the {first.role} of {place}"
        return (
            f"{who} met {first.value} in {batch} {where}; collectives ran there, so it may have come from any rank"
            f"{cause}."
        )
    if first.source == "unread":
        return f"{who} met a non-finite value in {batch} at the same point ({found_text(first)}); {_UNREAD}{cause}."
    what = "a non-finite weight" if first.source == "weight" else "a non-finite value"
    if first.source == "weight" and first.seen_in == FramePhase.OPTIMIZER:
        return (
            f"{who} met {what} after the step of {batch} ({found_text(first)}); the gradients that went "
            f"into that step were not looked at, so the first rank is unknown{cause}."
        )
    return (
        f"{who} met {what} in {batch} at the same point ({found_text(first)}); "
        f"it was made before, where nobody looked, so the first rank is unknown{cause}."
    )


def fed_sentence(met: LocalDiagnosis, fed: ValueArrival, host: str) -> str:
    """The statement where a rank has put a value into an operation that none of its modules is known to have made."""
    put = fed.put
    assert put is not None
    who = one_on(put.where.rank, host)
    batch = f"batch {met.batch}" if met.batch >= 0 else "its first batch"
    return (
        f"{who} put {put.value} into {way_text(put)}; rank {met.rank} was handed it in {batch} ({found_text(met)}). "
        f"No module of rank {put.where.rank} was seen to make it: code that no frame shows did, or was handed it."
    )


def skipped_sentence(first: LocalDiagnosis, host: str) -> str:
    """The statement where the rank is known and the module is not."""
    who = one_on(first.rank, host)
    return (
        f"{who} returned {first.value} from {first.root or 'its model'} in {_batch(first)}, which was {first.cause}: "
        "the module is unknown; watch every batch with --every 1 to have it named."
    )


def _batch(first: LocalDiagnosis) -> str:
    return f"batch {first.batch}" + (f" (step {first.step})" if first.step != first.batch else "")


def overflow_at(first: LocalDiagnosis, **rest: Any) -> Verdict:
    """A verdict at the place of a diagnosis. `rest` are its other fields, and those that differ from the diagnosis."""
    place = {name: getattr(first, name) for name in _SHARED} | {"role": first.own_role, "seen_in": seen_in(first)}
    return Verdict(kind=VerdictKind.OVERFLOW, **(place | rest))


def whose(facts: RunFacts, first: LocalDiagnosis) -> dict[str, Any]:
    """rank, host and device of a diagnosis, for a verdict that names them."""
    rank = facts.one(first.attempt, first.rank)
    if not is_rank(first.rank):
        return {"pid": pid_of_number(first.rank), "host": facts.host(rank) or None}
    return {"rank": first.rank, "host": facts.host(rank) or None, "device": device_of(rank)}
