"""Operations whose derivative is inf or nan for finite numbers, and what mends each."""

from __future__ import annotations

import re
from typing import NamedTuple

from ...core.codes import Certainty
from ..report.verdict import OverflowCause

_NODE = re.compile(r"(\w+?)Backward\d*")
_SNAKE = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[a-z0-9])(?=[A-Z][a-z])")
_NAMES = {"nll_loss": "nll_loss_forward", "nll_loss2d": "nll_loss2d_forward"}
"""Where a forward has another name than its node."""
INSIDE = "; torch.where around it keeps the forward finite, not the backward"


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
WEAK_RULES = {
    "div": DerivativeRule("for a divisor of 0, or near it", _AT_0),
    "reciprocal": DerivativeRule("at 0, or near it", _AT_0),
}
"""Looked at where there is none of the others: nearly every loss divides."""


def derivative_rule(name: str) -> DerivativeRule:
    """That of an operation that has one."""
    return DERIVATIVE_RULES.get(name) or WEAK_RULES[name]


def derivative_cause(node: str) -> OverflowCause | None:
    """The cause that torch's own anomaly mode names: `SqrtBackward0` returned nan. None for other operations."""
    name = operation_of_node(node)
    if name not in DERIVATIVE_RULES and name not in WEAK_RULES:
        return None
    rule = derivative_rule(name)
    return OverflowCause(
        "domain",
        Certainty.SUPPORTED,
        f"the derivative of `{name}` is not finite {rule.where}, and torch's anomaly mode names it",
        [f"Make what `{name}` is handed safe: {rule.mend}{INSIDE}. Not tried."],
    )


def operation_of_node(node: str) -> str:
    """The operation whose backward a node of autograd is.

    >>> [operation_of_node(name) for name in ("SqrtBackward0", "LinalgSvdBackward0", "Log1PBackward0")]
    ['sqrt', 'linalg_svd', 'log1p']
    """
    found = _NODE.fullmatch(node)
    name = _SNAKE.sub("_", found[1]).lower() if found is not None else ""
    return _NAMES.get(name, name)
