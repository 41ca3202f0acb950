"""The cause of a non-finite gradient, from the operations of autograd's graph between the tensor and the loss.

No operation of a backward runs again: its operands are freed. But the graph still has the names of its operations, and
few of them have a derivative that is inf or nan for finite numbers. Where the loss itself is not finite, one of its own
operations made it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...core.events import GraphNode, OperandNumbers
from ...core.verdicts import Certainty
from ..facts.diagnosis import LocalDiagnosis, number_text
from ..facts.facts import RunFacts
from ..report.model import OverflowCause
from .operation_rules import OPERATION_RULES

_NODE = re.compile(r"(\w+?)Backward\d*")
_SNAKE = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[a-z0-9])(?=[A-Z][a-z])")
_NAMES = {"nll_loss": "nll_loss_forward", "nll_loss2d": "nll_loss2d_forward", "log1p": "log1p", "log1_p": "log1p"}
_INSIDE = "; torch.where around it keeps the forward finite, not the backward"


class DerivativeRule(NamedTuple):
    """Where a derivative is not finite, and what mends it."""

    where: str
    mend: str


_AT_0 = "clamp_min(eps) what it is handed, or add an eps inside of it"
DERIVATIVE_RULES = {
    "sqrt": DerivativeRule("at 0", _AT_0),
    "rsqrt": DerivativeRule("at 0", _AT_0),
    "log": DerivativeRule("at 0", _AT_0),
    "log2": DerivativeRule("at 0", _AT_0),
    "log10": DerivativeRule("at 0", _AT_0),
    "log1p": DerivativeRule("at -1", _AT_0),
    "xlogy": DerivativeRule("at 0", _AT_0),
    "special_entr": DerivativeRule("at 0", _AT_0),
    "pow": DerivativeRule("at 0, for a power below 1", _AT_0),
    "atan2": DerivativeRule("at (0, 0)", "add an eps to one of its arguments"),
    "hypot": DerivativeRule("at (0, 0)", "add an eps to one of its arguments"),
    "acos": DerivativeRule("at 1 and -1", "clamp what it is handed to 1 - eps"),
    "asin": DerivativeRule("at 1 and -1", "clamp what it is handed to 1 - eps"),
    "acosh": DerivativeRule("at 1", "clamp what it is handed to 1 + eps"),
    "atanh": DerivativeRule("at 1 and -1", "clamp what it is handed to 1 - eps"),
    "erfinv": DerivativeRule("at 1 and -1", "clamp what it is handed to 1 - eps"),
    "logit": DerivativeRule("at 0 and 1", "give torch.logit an eps"),
    "std": DerivativeRule("for one element", "leave out a batch of one, or use correction=0 and an eps"),
    "std_mean": DerivativeRule("for one element", "leave out a batch of one, or use correction=0 and an eps"),
    "linalg_svd": DerivativeRule("for singular values that are equal", "use torch.linalg.svdvals where that is enough"),
    "linalg_eigh": DerivativeRule(
        "for eigenvalues that are equal", "use torch.linalg.eigvalsh where that is enough, or add noise to its diagonal"
    ),
}
"""Operation -> where its derivative is inf or nan."""
_WEAK = {
    "div": DerivativeRule("for a divisor of 0, or near it", _AT_0),
    "reciprocal": DerivativeRule("at 0, or near it", _AT_0),
}
"""Looked at where there is none of the others: nearly every loss divides."""


def cause_of_backward(facts: RunFacts, first: LocalDiagnosis) -> OverflowCause | None:
    """None if the graph shows no operation that can have made it, or several modules' operations may have."""
    rank = facts.one(first.attempt, first.rank)
    alarm = next((each for each in rank.anomalies if each.again is not None), None)
    if alarm is None or alarm.again is None or alarm.where.batch != first.batch or first.passed:
        return None
    graph, losses = alarm.again.graph, alarm.again.losses
    bad_loss = next((loss for loss in losses if loss.value not in ("finite", "")), None)
    is_outside = first.source == "outside"
    if bad_loss is not None and is_outside:
        return _of_loss(first, bad_loss, graph, alarm.again.loss_scale)
    if bad_loss is not None or not (is_outside or first.is_origin):
        return None
    names = _singular(_makers(graph, first.module if first.is_origin else ""))
    if not names:
        return None
    rules = {name: DERIVATIVE_RULES.get(name) or _WEAK[name] for name in names}
    where = "between the model's output and the loss" if is_outside else f"in `{first.module or first.cls}`"
    listed = " and ".join(f"`{name}` ({rule.where})" for name, rule in rules.items())
    has = "has a derivative" if len(rules) == 1 else "have derivatives"
    size = f"the loss is finite ({number_text(losses[0].abs_max)}); " if losses and losses[0].value == "finite" else ""
    return OverflowCause(
        "domain",
        Certainty.SUPPORTED,
        f"{size}of the operations {where}, {'only ' if len(rules) == 1 else ''}{listed} {has} that is not finite for "
        f"finite numbers",
        [
            f"Make what `{name}` is handed safe: {rule.mend}{_INSIDE}. Not tried: its operands are gone by then."
            for name, rule in rules.items()
        ],
    )


def _of_loss(
    first: LocalDiagnosis, loss: OperandNumbers, graph: Sequence[GraphNode], scale: float | None
) -> OverflowCause:
    """The loss was not finite before the backward began, and what the model returned was."""
    if loss.dtype == "float16" and loss.value == "+inf" and scale is not None and scale > 1:
        return OverflowCause(
            "scale",
            Certainty.SUPPORTED,
            f"the loss times the GradScaler's scale of {scale:g} is {loss.value} in float16",
            ["Compute the loss in float32 (loss.float() before scaler.scale), or begin with a smaller init_scale."],
        )
    able = _able_to_make(_makers(graph, ""), loss.value)
    rules = {name: OPERATION_RULES[name] for name in able}
    words = " and ".join(f"`{name}` ({rule.nan if loss.value == 'nan' else rule.inf})" for name, rule in rules.items())
    made = f"; of its operations, {'only ' if len(rules) == 1 else ''}{words} can have made that of finite numbers"
    return OverflowCause(
        "domain" if rules else "loss",
        Certainty.SUPPORTED,
        f"the loss was {loss.value} before its backward began, and what the model returned was finite: the script's "
        f"own loss has made it{made if rules else ''}",
        [f"In the script's loss, `{name}`: {rule.mend}. Not tried." for name, rule in rules.items()]
        or ["Look at the code of the script that computes the loss from what the model returns. Not tried."],
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


def operation_of_node(node: str) -> str:
    """The operation whose backward a node of autograd is.

    >>> [operation_of_node(name) for name in ("SqrtBackward0", "LinalgSvdBackward0", "Log1PBackward0")]
    ['sqrt', 'linalg_svd', 'log1p']
    """
    found = _NODE.fullmatch(node)
    name = _SNAKE.sub("_", found[1]).lower() if found is not None else ""
    return _NAMES.get(name, name)


def _singular(nodes: Iterable[GraphNode]) -> list[str]:
    """Operations among these whose derivative may not be finite, each once."""
    names: dict[str, None] = {}
    for node in nodes:
        name = operation_of_node(node.op)
        is_smooth = name == "pow" and node.exponent is not None and node.exponent >= 1
        if not node.passes and not is_smooth:
            names[name] = None
    strong = [name for name in names if name in DERIVATIVE_RULES]
    return strong or [name for name in names if name in _WEAK]


def _able_to_make(nodes: Iterable[GraphNode], value: str) -> list[str]:
    """Operations among these that can make this value of finite numbers, each once."""
    names: dict[str, None] = {}
    for node in nodes:
        name = operation_of_node(node.op)
        rule = OPERATION_RULES.get(name)
        if rule is not None and (rule.nan if value == "nan" else rule.inf):
            names[name] = None
    strong = [name for name in names if name not in ("div", "pow", "mean", "prod", "exp")]
    return strong or list(names)
