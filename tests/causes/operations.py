"""One row for each operation that makes non-finite values of finite ones: how it does, and the mend that was tried.

(name of the operation, what makes the value, what a rule says of it, the same thing mended)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

ZERO, ONE, BELOW, HUGE = torch.zeros(3), torch.ones(3), torch.full((3,), -1.5), torch.full((3,), 1e30)
EPS = 1e-6
NONE = torch.zeros(0)
SINGULAR = torch.ones(2, 2)
EYE = torch.eye(2)
IGNORED, LABELS = torch.full((4,), -100), torch.tensor([0, 1, 2, 0])
LOGITS = torch.arange(12.0).reshape(4, 3)
LONG = torch.tensor([[1, 2, 1, 2]])


class MadeBadly(NamedTuple):
    name: str
    make: Callable[[], torch.Tensor]
    words: str
    """A part of what the rule says; "" where the value is only too large for its dtype."""
    mended: Callable[[], torch.Tensor]
    is_near_zero: bool = False
    """It divides by a number that is not 0, and float64 holds the quotient."""


def ctc(*, zero_infinity: bool) -> torch.Tensor:
    steps = torch.zeros(3, 1, 4).log_softmax(-1)
    return F.ctc_loss(steps, LONG, torch.tensor([3]), torch.tensor([4]), zero_infinity=zero_infinity)


ROWS = [
    MadeBadly("log", lambda: ZERO.log(), "the log of 0", lambda: ZERO.clamp_min(EPS).log()),
    MadeBadly("log", lambda: BELOW.log(), "a number below 0", lambda: BELOW.clamp_min(EPS).log()),
    MadeBadly("log2", lambda: ZERO.log2(), "the log of 0", lambda: ZERO.clamp_min(EPS).log2()),
    MadeBadly("log10", lambda: ZERO.log10(), "the log of 0", lambda: (ZERO + EPS).log10()),
    MadeBadly("log1p", lambda: (-ONE).log1p(), "log1p of -1", lambda: (-ONE + EPS).log1p()),
    MadeBadly("log1p", lambda: BELOW.log1p(), "below -1", lambda: BELOW.clamp_min(-1 + EPS).log1p()),
    MadeBadly("logit", lambda: ONE.logit(), "the logit of 0 or 1", lambda: ONE.logit(eps=EPS)),
    MadeBadly("logit", lambda: BELOW.logit(), "outside of 0 to 1", lambda: BELOW.logit(eps=EPS)),
    MadeBadly("xlogy", lambda: torch.xlogy(ONE, ZERO), "the log of 0", lambda: torch.xlogy(ONE, ZERO + EPS)),
    MadeBadly("xlogy", lambda: torch.xlogy(ONE, BELOW), "below 0", lambda: torch.xlogy(ONE, BELOW.clamp_min(EPS))),
    MadeBadly(
        "special_xlog1py",
        lambda: torch.special.xlog1py(ONE, -ONE),
        "log1p of -1",
        lambda: torch.special.xlog1py(ONE, EPS - ONE),
    ),
    MadeBadly(
        "special_entr", lambda: torch.special.entr(BELOW), "below 0", lambda: torch.special.entr(BELOW.clamp_min(EPS))
    ),
    MadeBadly("sqrt", lambda: BELOW.sqrt(), "the square root of a number below 0", lambda: BELOW.clamp_min(EPS).sqrt()),
    MadeBadly("rsqrt", lambda: ZERO.rsqrt(), "1 / sqrt(0)", lambda: (ZERO + EPS).rsqrt()),
    MadeBadly("rsqrt", lambda: BELOW.rsqrt(), "below 0", lambda: BELOW.clamp_min(EPS).rsqrt()),
    MadeBadly("div", lambda: ZERO / ZERO, "0 / 0", lambda: ZERO / (ZERO + EPS)),
    MadeBadly("div", lambda: ONE / ZERO, "a division by 0", lambda: ONE / (ZERO + EPS)),
    MadeBadly("div", lambda: ONE / (ONE * 1e-39), "or by a number near 0", lambda: ONE / (ZERO + EPS), True),
    MadeBadly("div", lambda: (ONE * 2).div_(0.0), "a division by 0", lambda: (ONE * 2).div_(EPS)),
    MadeBadly("reciprocal", lambda: ZERO.reciprocal(), "a division by 0", lambda: (ZERO + EPS).reciprocal()),
    MadeBadly("addcdiv", lambda: torch.addcdiv(ZERO, ZERO, ZERO), "0 / 0", lambda: torch.addcdiv(ZERO, ZERO, ONE)),
    MadeBadly("remainder", lambda: ONE % ZERO, "remainder", lambda: ONE % (ZERO + EPS)),
    MadeBadly("fmod", lambda: ONE.fmod(ZERO), "remainder", lambda: ONE.fmod(ZERO + EPS)),
    MadeBadly("pow", lambda: BELOW**0.5, "not whole", lambda: BELOW.clamp_min(EPS) ** 0.5),
    MadeBadly("pow", lambda: ZERO**-0.5, "0 to a power below 0", lambda: (ZERO + EPS) ** -0.5),
    MadeBadly("pow", lambda: torch.pow(ZERO, -ONE), "0 to a power below 0", lambda: torch.pow(ZERO + EPS, -ONE)),
    MadeBadly("acos", lambda: BELOW.acos(), "beyond 1 or -1", lambda: BELOW.clamp(EPS - 1, 1 - EPS).acos()),
    MadeBadly("asin", lambda: BELOW.asin(), "beyond 1 or -1", lambda: BELOW.clamp(EPS - 1, 1 - EPS).asin()),
    MadeBadly("acosh", lambda: ZERO.acosh(), "below 1", lambda: ZERO.clamp_min(1 + EPS).acosh()),
    MadeBadly("atanh", lambda: ONE.atanh(), "atanh of 1 or -1", lambda: ONE.clamp(EPS - 1, 1 - EPS).atanh()),
    MadeBadly("atanh", lambda: BELOW.atanh(), "beyond 1 or -1", lambda: BELOW.clamp(EPS - 1, 1 - EPS).atanh()),
    MadeBadly("erfinv", lambda: ONE.erfinv(), "erfinv of 1 or -1", lambda: ONE.clamp(EPS - 1, 1 - EPS).erfinv()),
    MadeBadly("erfinv", lambda: BELOW.erfinv(), "beyond 1 or -1", lambda: BELOW.clamp(EPS - 1, 1 - EPS).erfinv()),
    MadeBadly(
        "special_ndtri",
        lambda: torch.special.ndtri(ONE),
        "ndtri of 0 or 1",
        lambda: torch.special.ndtri(ONE.clamp(EPS, 1 - EPS)),
    ),
    MadeBadly("digamma", lambda: ZERO.digamma(), "digamma of 0", lambda: (ZERO + EPS).digamma()),
    MadeBadly("digamma", lambda: (-ONE).digamma(), "whole number below 0", lambda: (EPS - ONE).digamma()),
    MadeBadly("lgamma", lambda: (-ONE).lgamma(), "whole number below 0", lambda: (ONE / 2).lgamma()),
    MadeBadly("polygamma", lambda: torch.polygamma(1, ZERO), "below 1", lambda: torch.polygamma(1, ZERO + EPS)),
    MadeBadly("exp", lambda: (ONE * 1e4).exp(), "exp of a number", lambda: (ONE * 1e4).clamp_max(80).exp()),
    MadeBadly("exp", lambda: (ONE * 100).exp(), "", lambda: (ONE * 100).clamp_max(80).exp()),
    MadeBadly("exp2", lambda: (ONE * 1e4).exp2(), "2 to a power", lambda: (ONE * 1e4).clamp_max(80).exp2()),
    MadeBadly("expm1", lambda: (ONE * 1e4).expm1(), "expm1 of", lambda: (ONE * 1e4).clamp_max(80).expm1()),
    MadeBadly("sinh", lambda: (ONE * 1e4).sinh(), "sinh of", lambda: (ONE * 1e4).tanh().sinh()),
    MadeBadly("cosh", lambda: (ONE * 1e4).cosh(), "cosh of", lambda: (ONE * 1e4).tanh().cosh()),
    MadeBadly(
        "special_erfcx",
        lambda: torch.special.erfcx(ONE * -100),
        "erfcx of",
        lambda: torch.special.erfcx((ONE * -100).clamp_min(-3)),
    ),
    MadeBadly("i0", lambda: torch.i0(ONE * 1e3), "i0 of", lambda: torch.special.i0e(ONE * 1e3)),
    MadeBadly("special_i1", lambda: torch.special.i1(ONE * 1e3), "i1 of", lambda: torch.special.i1e(ONE * 1e3)),
    MadeBadly("prod", lambda: HUGE.prod(), "", lambda: HUGE.log().sum()),
    MadeBadly("cumprod", lambda: HUGE.cumprod(0), "", lambda: HUGE.log().cumsum(0)),
    MadeBadly(
        "nll_loss_forward",
        lambda: F.cross_entropy(LOGITS, IGNORED),
        "every target is ignored",
        lambda: F.cross_entropy(LOGITS, IGNORED, reduction="sum") / (IGNORED >= 0).sum().clamp(min=1),
    ),
    MadeBadly(
        "nll_loss2d_forward",
        lambda: F.cross_entropy(LOGITS.T[None], IGNORED[None]),
        "every target is ignored",
        lambda: F.cross_entropy(LOGITS.T[None], IGNORED[None], reduction="sum") / (IGNORED >= 0).sum().clamp(min=1),
    ),
    MadeBadly("_ctc_loss", lambda: ctc(zero_infinity=False), "longer than its input", lambda: ctc(zero_infinity=True)),
    MadeBadly("mean", lambda: NONE.mean(), "a mean over nothing", lambda: NONE.sum() / max(1, NONE.numel())),
    MadeBadly("median", lambda: NONE.median(), "the median of nothing", lambda: ONE.median()),
    MadeBadly("std", lambda: ONE[:1].std(), "fewer than two elements", lambda: ONE[:1].std(correction=0)),
    MadeBadly("var", lambda: ONE[:1].var(), "fewer than two elements", lambda: ONE[:1].var(correction=0)),
    MadeBadly(
        "std_mean",
        lambda: torch.std_mean(ONE[:1])[0],
        "fewer than two elements",
        lambda: torch.std_mean(ONE[:1], correction=0)[0],
    ),
    MadeBadly(
        "var_mean",
        lambda: torch.var_mean(ONE[:1])[0],
        "fewer than two elements",
        lambda: torch.var_mean(ONE[:1], correction=0)[0],
    ),
    MadeBadly(
        "native_layer_norm",
        lambda: F.layer_norm(ONE, (3,), eps=0.0),
        "without variance",
        lambda: F.layer_norm(ONE, (3,)),
    ),
    MadeBadly(
        "native_group_norm",
        lambda: F.group_norm(torch.ones(1, 2, 2), 1, eps=0.0),
        "without variance",
        lambda: F.group_norm(torch.ones(1, 2, 2), 1),
    ),
    MadeBadly(
        "_weight_norm_interface",
        lambda: torch._weight_norm(torch.zeros(2, 2), torch.ones(2, 1), 0),
        "a row of the weight is 0",
        lambda: torch._weight_norm(torch.ones(2, 2), torch.ones(2, 1), 0),
    ),
    MadeBadly(
        "_linalg_slogdet",
        lambda: torch.linalg.slogdet(SINGULAR)[1],
        "singular matrix",
        lambda: torch.linalg.slogdet(SINGULAR + EPS * EYE)[1],
    ),
    MadeBadly("mul", lambda: HUGE * HUGE, "", lambda: HUGE.double() * HUGE.double()),
    MadeBadly("add", lambda: (HUGE * 3e8) + (HUGE * 3e8), "", lambda: HUGE.double() * 3e8 + HUGE.double() * 3e8),
    MadeBadly("sum", lambda: (HUGE * 2e8).sum(), "", lambda: (HUGE.double() * 2e8).sum()),
    MadeBadly("mm", lambda: (EYE * 1e30) @ (EYE * 1e30), "", lambda: (EYE.double() * 1e30) @ (EYE.double() * 1e30)),
    MadeBadly("mm", lambda: (EYE.half() * 300) @ (EYE.half() * 300), "", lambda: (EYE * 300) @ (EYE * 300)),
    MadeBadly("_to_copy", lambda: HUGE.half(), "", lambda: HUGE.bfloat16()),
    MadeBadly("div", lambda: HUGE.half().clamp(max=60000) / 0.5, "", lambda: HUGE.bfloat16() / 0.5),
    MadeBadly("square", lambda: HUGE.square(), "", lambda: HUGE.double().square()),
    MadeBadly("linalg_vector_norm", lambda: (ONE * 6e4).half().norm(), "", lambda: (ONE * 6e4).norm()),
]
