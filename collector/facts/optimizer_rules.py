"""Whether an optimizer's rule can have made a weight non-finite, from the known numbers of the step. Pure.

Each rule gives the largest change that a step can make, from the largest gradient, weight and state. If weight and
change together are far below the dtype's largest number, the step did not make it: the weight was changed by
something else, between the forward and the step.

    SGD     lr 0.1, gradient at most 2.0, weight at most 0.5   ->  at most 0.5 + 0.2: the step cannot make an inf
    SGD     lr 3e38, the same                                  ->  beyond float32: it can
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...core.events.looked_again import OptimizerStep
from ...core.values import DTYPE_MAX

_MARGIN = 2.0**-8
"""Sums of many terms are rounded: a bound below this share of the dtype's maximum cannot overflow."""
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
"""The smallest positive number of a dtype: an eps below it is 0."""


class KnownStep(NamedTuple):
    """The inputs of the step of one weight. All numbers but `least` are abs max, and finite."""

    weight: float
    gradient: float
    state: Mapping[str, float]
    elements: int
    dtype: str
    least: Mapping[str, float | None] = {}
    """abs min of each state after the step."""


def can_make_non_finite(step: OptimizerStep | None, known: KnownStep) -> bool | None:
    """Whether the step can have made the weight non-finite; None if that is unknown."""
    largest = DTYPE_MAX.get(known.dtype)
    if step is None or largest is None or known.dtype not in _SMALLEST:
        return None
    rule, needs = _RULES.get(step.cls.rpartition(".")[2], (None, ())) if is_torchs(step) else (None, ())
    if rule is None or any(key not in known.state for key in needs) or "lr" not in step.settings:
        return None
    if not all(map(math.isfinite, (known.weight, known.gradient, *known.state.values()))):
        return None
    change = rule(step.settings, known)
    if change is None:
        return True if _divides_by_zero(step.settings, known) else None
    decay = abs(step.settings["lr"] * step.settings.get("weight_decay", 0.0)) * known.weight
    return not known.weight + decay + change < largest * _MARGIN


def is_torchs(step: OptimizerStep | None) -> bool:
    """Whether the optimizer is one of torch's own."""
    return step is not None and step.cls.startswith("torch.optim.")


def square_overflows(step: OptimizerStep | None, key: str, gradient: float, dtype: str) -> bool:
    """Whether a mean of squares overflows in this very step, of a gradient of this abs max: by torch's own Adam.

    >>> adam = OptimizerStep("torch.optim.adam.Adam", {"betas[1]": 0.999})
    >>> square_overflows(adam, "exp_avg_sq", 1e4, "float16"), square_overflows(adam, "exp_avg_sq", 300.0, "float16")
    (True, False)
    """
    largest, share = DTYPE_MAX.get(dtype), 1 - step.settings.get("betas[1]", 1.0) if step is not None else 0.0
    if largest is None or key != "exp_avg_sq" or not is_torchs(step) or not 0 < share <= 1:
        return False
    return share * gradient * gradient > largest


def _sgd(settings: Mapping[str, float], known: KnownStep) -> float | None:
    momentum = abs(settings.get("momentum", 0.0))
    buffer = known.state.get("momentum_buffer") if momentum else 0.0
    if buffer is None:
        return None
    return abs(settings["lr"]) * (_decayed(settings, known) + (1 + momentum) * buffer)


def _adam(settings: Mapping[str, float], known: KnownStep) -> float | None:
    eps = _eps(settings, known)
    correction = 1 - settings.get("betas[0]", math.nan)
    if eps is None or not 0 < correction <= 1:
        return None
    return abs(settings["lr"]) * known.state["exp_avg"] / correction / eps


def _adagrad(settings: Mapping[str, float], known: KnownStep) -> float | None:
    eps = _eps(settings, known)
    return abs(settings["lr"]) * _decayed(settings, known) / eps if eps is not None else None


def _rmsprop(settings: Mapping[str, float], known: KnownStep) -> float | None:
    eps = _eps(settings, known)
    if eps is None or settings.get("centered"):  # the variance minus the mean's square may be negative: nan
        return None
    buffer = known.state.get("momentum_buffer") if settings.get("momentum") else 0.0
    return abs(settings["lr"]) * (_decayed(settings, known) / eps + buffer) if buffer is not None else None


def _adafactor(settings: Mapping[str, float], known: KnownStep) -> float | None:
    """Its update is divided by its own root mean square, so it is at most `sqrt(elements)` times `d` times the rate."""
    largest = DTYPE_MAX[known.dtype]
    d, elements = settings.get("d"), max(1, known.elements)
    if d is None or not d > 0 or known.gradient * elements > math.sqrt(largest):
        return None
    return abs(settings["lr"]) * max(1e-3, settings.get("eps[1]", 1e-3), known.weight) * math.sqrt(elements) * d


def _decayed(settings: Mapping[str, float], known: KnownStep) -> float:
    """The gradient with the decay of the weight in it."""
    return known.gradient + abs(settings.get("weight_decay", 0.0)) * known.weight


def _eps(settings: Mapping[str, float], known: KnownStep) -> float | None:
    """The smallest divisor of the update; None if it may be 0, as 0 / 0 is nan."""
    eps = settings.get("eps", 0.0)
    return eps if eps > _SMALLEST[known.dtype] else None


def _divides_by_zero(settings: Mapping[str, float], known: KnownStep) -> bool:
    """Whether an element's divisor is 0 for certain: no eps, and a mean of squares that is 0."""
    is_other = settings.get("amsgrad") or settings.get("centered")  # these divide by another number
    is_zero = any(known.least.get(key) == 0 for key in ("exp_avg_sq", "sum", "square_avg"))
    return settings.get("eps") == 0 and not is_other and is_zero


_RULES: dict[str, tuple[Callable[[Mapping[str, float], KnownStep], float | None], tuple[str, ...]]] = {
    "SGD": (_sgd, ()),
    "Adam": (_adam, ("exp_avg", "exp_avg_sq")),
    "AdamW": (_adam, ("exp_avg", "exp_avg_sq")),
    "Adagrad": (_adagrad, ("sum",)),
    "RMSprop": (_rmsprop, ("square_avg",)),
    "Adafactor": (_adafactor, ()),
}
"""Optimizer -> (the largest change that its step can make, None if that is not known; keys of the state without which
nothing is known)."""
