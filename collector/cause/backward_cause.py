"""The cause of a non-finite gradient, from the operations of autograd's graph between the tensor and the loss.

A second run of the backward shows the operation. Where there is none, its operands are freed. But the graph still has
the names of its operations, and few of them have a derivative that is inf or nan for finite numbers. Where the loss
itself is not finite, one of its own operations made it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ...core.codes import Certainty
from ...core.events.alarm_evidence import BadOperation
from ...core.events.looked_again import GraphNode, LookedAgain
from ...core.events.read_tensors import OperandNumbers
from ...core.frames import Frame, FramePhase
from ...core.text import joined
from ...core.values import DTYPES_OF_16_BITS
from ..facts.diagnosis import LocalDiagnosis, number_text
from ..facts.loss_origin import what_script_got
from ..facts.replicas import page_of
from ..facts.run_facts import RunFacts
from ..report.verdict import OverflowCause
from .derivative_rules import DERIVATIVE_RULES, INSIDE, WEAK_RULES, derivative_rule, operation_of_node
from .operation_cause import named
from .operation_rules import OPERATION_RULES, trial_in
from .script_cause import cause_in_script, not_handed_on, variable_in_script

_MOST_NAMED = 3
_HUGE = 1e9
"""An output that is larger was none of a healthy model."""


def bad_variable(facts: RunFacts, first: LocalDiagnosis) -> str:
    """The script's variable that was bad before a bad loss was made of it: a clause; "" if unknown."""
    again = _second_look(facts, first)
    return variable_in_script(not_handed_on(again.script)) if again is not None else ""


def cause_of_loss(facts: RunFacts, first: LocalDiagnosis) -> OverflowCause | None:
    """None if another rank may have sent the value, or if what the model returned was not finite, or huge."""
    again = _second_look(facts, first)
    if again is None or not all(row.finite for _, row in what_script_got(_forward(facts, first))):
        return None
    return _of_loss(facts, first, first.row.value, first.row.dtype, again)


def cause_of_scale(facts: RunFacts, first: LocalDiagnosis) -> OverflowCause | None:
    """The cause where a GradScaler's scale made a loss of float16 inf; None if it did not."""
    again = _second_look(facts, first)
    return _of_scale(first.row.value, first.row.dtype, again) if again is not None else None


def _second_look(facts: RunFacts, first: LocalDiagnosis) -> LookedAgain | None:
    """None if there is none at this batch, or if the value may come from another rank."""
    rank = facts.one(first.attempt, first.rank)
    alarm = next((each for each in rank.anomalies if each.again is not None), None)
    if alarm is None or alarm.where.batch != first.batch or first.passage.passed:
        return None
    return alarm.again


def cause_of_backward(facts: RunFacts, first: LocalDiagnosis) -> OverflowCause | None:
    """None if the graph shows no operation that can have made it, or several modules' operations may have."""
    again = _second_look(facts, first)
    if again is None:
        return None
    graph, losses = again.graph, again.losses
    bad_loss = next((loss for loss in losses if loss.is_bad), None)
    is_outside = first.source == "outside"
    if bad_loss is not None and is_outside:
        return _of_loss(facts, first, bad_loss.value, bad_loss.dtype, again)
    if bad_loss is not None or not (is_outside or first.is_origin):
        return None
    where = "between the model's output and the loss" if is_outside else f"in `{first.module or first.cls}`"
    return _in_derivatives(_makers(graph, first.module if first.is_origin else ""), losses, first.row.dtype, where)


def cause_of_loose(facts: RunFacts, first: LocalDiagnosis) -> OverflowCause | None:
    """The cause of a bad gradient of a parameter of no module. None if the loss was not finite, or huge."""
    again = _second_look(facts, first)
    if again is None or not again.gradient or not again.losses:
        return None
    if any(loss.value != "finite" or (loss.abs_max or 0.0) > _HUGE for loss in again.losses):
        return None
    return _in_derivatives(
        _makers(again.graph, ""), again.losses, first.row.dtype, f"between `{first.role}` and the loss"
    )


def _in_derivatives(
    makers: Sequence[GraphNode], losses: Sequence[OperandNumbers], dtype: str, where: str
) -> OverflowCause | None:
    """Those of the operations that have a derivative that may not be finite. `where`: they are, as a clause."""
    names = _singular(makers)
    # what a function of the script's own does is not known; a gradient of 16 bits may be too large
    if not names or any(node.opaque for node in makers) or dtype in DTYPES_OF_16_BITS:
        return None
    rules = {name: derivative_rule(name) for name in names}
    listed = " and ".join(f"`{name}` ({rule.where})" for name, rule in rules.items())
    has = "has a derivative" if len(rules) == 1 else "have derivatives"
    size = f"the loss is finite ({number_text(losses[0].abs_max)}); " if losses and losses[0].value == "finite" else ""
    return OverflowCause(
        "domain",
        Certainty.SUPPORTED,
        f"{size}of the operations {where}, {listed} {has} that is not finite for finite numbers",
        [
            f"Make what `{name}` is handed safe: {rule.mend}{INSIDE}. Not tried: its operands are gone by then."
            for name, rule in rules.items()
        ],
    )


def cause_in_derivative(operation: BadOperation) -> OverflowCause | None:
    """A derivative that a trial has shown to be not finite in float64 either; None for other operations."""
    in_float64, name = trial_in(operation.trials, "float64"), operation_of_node(operation.node)
    if in_float64 is None or in_float64.value == "finite":
        return None
    if name not in DERIVATIVE_RULES and name not in WEAK_RULES:
        return None
    rule = derivative_rule(name)
    handed = f", handed {joined([f'{number:.9g}' for number in operation.handed])}," if operation.handed else ""
    return OverflowCause(
        "domain",
        Certainty.ESTABLISHED,
        f"the derivative of `{name}` ({rule.where}) is not finite; tried: {named(operation)} of it{handed} is "
        f"{in_float64.value} in float64, too",
        [f"Make what `{name}` is handed safe: {rule.mend}{INSIDE}. Not tried."],
        [in_float64],
    )


def _forward(facts: RunFacts, first: LocalDiagnosis) -> list[Frame]:
    page = page_of(facts, first)
    return [frame for frame in page.frames if frame.phase == FramePhase.FORWARD] if page is not None else []


def _largest_output(facts: RunFacts, first: LocalDiagnosis) -> float:
    """abs max of what the modules of the model returned in that batch."""
    rows = (row for frame in _forward(facts, first) for row in frame.outputs)
    return max((row.abs_max or 0.0 for row in rows if row.finite), default=0.0)


def _of_loss(
    facts: RunFacts, first: LocalDiagnosis, value: str, dtype: str, again: LookedAgain
) -> OverflowCause | None:
    """The loss was not finite before the backward began, and what the model returned was."""
    scale = _of_scale(value, dtype, again)
    if scale is not None:
        return scale
    if _largest_output(facts, first) > _HUGE:
        return None  # a loss of such outputs may be too large a number
    lead = f"the loss was {value} before its backward began"
    lead += ", and what the model returned was finite" if what_script_got(_forward(facts, first)) else ""
    in_script = cause_in_script(not_handed_on(again.script), f"{lead}; ")
    if in_script is not None and in_script.kind == "domain":
        return in_script
    # tensors without a gradient are in no graph: that an operation of it has made the value is not certain
    able = _able_to_make(_makers(again.graph, ""), value)[:_MOST_NAMED]
    rules = {name: OPERATION_RULES[name] for name in able}
    mends = [f"In the script's loss, look at `{name}`: {rule.mend}. Not tried." for name, rule in rules.items()]
    if in_script is not None:
        return msgspec.structs.replace(in_script, next=[*in_script.next, *mends])
    return OverflowCause(
        "script",
        Certainty.SUPPORTED,
        f"{lead}: the script's own loss has made it",
        mends or ["Look at the code of the script that computes the loss from what the model returns."],
    )


def _of_scale(value: str, dtype: str, again: LookedAgain) -> OverflowCause | None:
    if dtype != "float16" or value != "+inf" or again.loss_scale is None or again.loss_scale <= 1:
        return None
    return OverflowCause(
        "scale",
        Certainty.SUPPORTED,
        f"the loss times the GradScaler's scale of {again.loss_scale:g} is {value} in float16",
        ["Compute the loss in float32 (loss.float() before scaler.scale), or begin with a smaller init_scale."],
    )


def _makers(graph: Sequence[GraphNode], module: str) -> list[GraphNode]:
    """The nodes between a tensor and the loss, or the next outputs of modules. `module`: those of its calls alone."""
    reached: set[int] = set()
    left, found = list(graph[0].users) if graph else [], []
    while left:
        position = left.pop(0)
        if position in reached or not 0 < position < len(graph):
            continue
        reached.add(position)
        node = graph[position]
        if not module or (node.call >= 0 and (node.module == module or node.module.startswith(f"{module}."))):
            found.append(node)
        left += node.users
    return found


def _singular(nodes: Iterable[GraphNode]) -> list[str]:
    """Operations among these whose derivative may not be finite, each once."""
    names: dict[str, None] = {}
    for node in nodes:
        name = operation_of_node(node.op)
        is_smooth = name == "pow" and node.exponent is not None and node.exponent >= 1
        if not node.passes and not is_smooth:
            names[name] = None
    strong = [name for name in names if name in DERIVATIVE_RULES]
    return strong or [name for name in names if name in WEAK_RULES]


def _able_to_make(nodes: Iterable[GraphNode], value: str) -> list[str]:
    """Operations among these that can make this value of finite numbers, each once."""
    names: dict[str, None] = {}
    for node in nodes:
        name = operation_of_node(node.op)
        rule = OPERATION_RULES.get(name)
        if node.exponent is not None and node.exponent >= 0 and node.exponent.is_integer():
            continue  # a square is defined for all numbers
        if rule is not None and (rule.nan if value == "nan" else rule.inf):
            names[name] = None
    strong = [name for name in names if name not in ("div", "pow", "mean", "prod", "exp")]
    return strong or list(names)
