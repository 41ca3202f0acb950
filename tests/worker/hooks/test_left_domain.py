"""The advice for an operation that was given finite numbers outside of its domain, from its own second run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from torch import nn

OUTSIDE = "An input was outside of the operation's domain ({})"
DOMAIN = OUTSIDE + ": look at what makes it, and clamp it or add an eps."
INTERVAL = OUTSIDE + ": keep it inside of the open interval from -1 to 1: clamp it to 1 - eps."
HALF = " In float16 a number below 3e-8 is 0."
GROWTH = (
    "No optimizer step was seen before it: look at the initialisation of the weights, or at the checkpoint, and at the "
    "scale of the inputs."
)
FLOAT16 = "Compute this part in bfloat16 or float32 (tried: finite)"


class Applies(nn.Module):
    """Calls a function with `value`, times ones that come out of a layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.function, self.value = nn.Linear(4, 4, dtype=dtype), function, value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.value + 0 * self.layer(x))


def advice(watch: Callable[..., Any], function: Any, value: float, dtype: torch.dtype = torch.float32) -> str:
    watched = watch(on_overflow="abort")
    with pytest.raises(OverflowDetected):
        Applies(function, value, dtype)(torch.ones(2, 4, dtype=dtype))
    verdict = watched.verdict()
    assert (verdict.kind, watched.faults) == ("overflow", [])
    assert verdict.operation is not None
    return str(verdict.next[0])


@pytest.mark.parametrize(
    ("function", "value", "what"),
    [
        (torch.log, -1.0, "the log of a number below 0"),
        (lambda x: torch.log2(x) * 0, 0.0, "the log of 0"),
        (torch.log1p, -2.0, "log1p of a number below -1"),
        (lambda x: torch.log1p(x) * 0, -1.0, "log1p of -1"),
        (torch.Tensor.sqrt_, -1.0, "the square root of a number below 0"),
        (torch.rsqrt, -1.0, "the square root of a number below 0"),
        (torch.rsqrt, 0.0, "1 / sqrt(0)"),
        (lambda x: x / 0, 0.0, "0 / 0"),
        (lambda x: x / x, 0.0, "0 / 0"),
        (lambda x: x / torch.zeros(4, dtype=torch.int64), 0.0, "0 / 0"),
        (lambda x: x / 0, 3.0, "a division by 0"),
        (lambda x: 2 / x, 0.0, "a division by 0"),
        (lambda x: 1 / x, 1e-39, "a division by 0, or by a number near 0"),
        (lambda x: x / torch.tensor([0.0, 1, 1, 1]), 3.0, "a division by 0"),
        (lambda x: x / torch.zeros(4, dtype=torch.int64), 3.0, "a division by 0"),
        (lambda x: x / 1e-39, 3.0, "a division by 0, or by a number near 0"),
        (lambda x: x**0.5, -1.0, "a number below 0 to a power that is not whole"),
    ],
)
def test_what_left_the_domain_is_said(watch: Callable[..., Any], function: Any, value: float, what: str) -> None:
    assert advice(watch, function, value) == DOMAIN.format(what)


@pytest.mark.parametrize(
    ("function", "value", "what"),
    [(torch.acos, 2.0, "acos of a number beyond 1 or -1"), (torch.atanh, 1.0, "atanh of 1 or -1")],
)
def test_the_mend_is_that_of_the_operation(watch: Callable[..., Any], function: Any, value: float, what: str) -> None:
    assert advice(watch, function, value) == INTERVAL.format(what)


def test_what_no_dtype_holds_is_bounded(watch: Callable[..., Any]) -> None:
    """exp(1000) is beyond float64, too."""
    assert advice(watch, torch.exp, 1e3).startswith(OUTSIDE.format("exp of a number that is too large")[:-1])


@pytest.mark.parametrize("function", [torch.exp, torch.expm1])
def test_what_float32_alone_does_not_hold_is_bounded(watch: Callable[..., Any], function: Any) -> None:
    """exp(100) is finite in float64: an ordinary number for most operations, and too large for this one."""
    assert advice(watch, function, 100.0).startswith("float32 cannot hold its result: bound what it is handed")


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (lambda x: x * 1e30, 1e30),
        (lambda x: x / 0.01, 1e38),
        (lambda x: x**2, 1e30),
        (lambda x: (x * 1j).log().real * 0, 0.0),
    ],
)
def test_an_overflow_is_none(watch: Callable[..., Any], function: Any, value: float) -> None:
    assert advice(watch, function, value) == GROWTH


@pytest.mark.parametrize(
    ("function", "value", "first"),
    [
        (lambda x: torch.log(x) * 0, 1e-9, DOMAIN.format("the log of 0") + HALF),
        (torch.log, -1.0, DOMAIN.format("the log of a number below 0")),
        (torch.reciprocal, 1e-5, FLOAT16),
        (torch.reciprocal, 1e-8, DOMAIN.format("a division by 0") + HALF),
        (lambda x: x / torch.tensor(0.5, dtype=x.dtype), 6e4, FLOAT16),
        (lambda x: torch.tensor(10**6) / x, 1.0, FLOAT16),
    ],
)
def test_in_float16(watch: Callable[..., Any], function: Any, value: float, first: str) -> None:
    assert advice(watch, function, value, torch.float16).startswith(first)
