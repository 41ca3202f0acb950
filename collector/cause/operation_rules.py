"""What operations of torch are not defined for, and the mend of each. Finite numbers that are outside of an operation's
domain give nan or inf in every dtype: no step, no scale and no wider dtype explains that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...core.events.alarm_evidence import BadOperation, CauseTrial
from ...core.values import DTYPE_MAX, DTYPES_OF_16_BITS


class OperationRule(NamedTuple):
    """What made nan of finite numbers, what made inf of them, and what mends it; "" if it has other causes."""

    nan: str = ""
    inf: str = ""
    mend: str = ""


_BY_ZERO = "a division by 0"
_OF_ZERO = ("the log of 0", "1 / sqrt(0)", "0 / 0", _BY_ZERO, f"{_BY_ZERO}, or by a number near 0")
_EPS = "look at what makes it, and clamp it or add an eps"
_LOG = OperationRule("the log of a number below 0", "the log of 0", _EPS)
_BOUND = "bound what it is handed (clamp, tanh), or stay in log space (logsumexp, log_softmax, log_prob)"
_FEW = "correction=0 (unbiased=False), or leave out a batch of one"
_NOTHING = "leave out an empty selection, or divide its sum by count.clamp(min=1)"
_DET = OperationRule(inf="the log of the determinant of a singular matrix", mend="add an eps to its diagonal")
_PRODUCT = OperationRule(inf="a product that grows beyond its dtype", mend="add up logs in place of the product")
_NLL = OperationRule(
    "a mean over no label: every target is ignored",
    mend="leave out such a batch, or use reduction='sum' and divide by the count of targets, clamped to at least 1",
)
_NORM = OperationRule("0 / 0: a row without variance, and eps 0", _BY_ZERO, "give it an eps that its dtype can hold")
_BEYOND_1 = "keep it inside of the open interval from -1 to 1: clamp it to 1 - eps"
OPERATION_RULES = {
    "log": _LOG,
    "log2": _LOG,
    "log10": _LOG,
    "log1p": OperationRule("log1p of a number below -1", "log1p of -1", _EPS),
    "logit": OperationRule("the logit of a number outside of 0 to 1", "the logit of 0 or 1", "give torch.logit an eps"),
    "xlogy": OperationRule("the log of a number below 0", "a number times the log of 0", _EPS),
    "special_xlog1py": OperationRule("log1p of a number below -1", "a number times log1p of -1", _EPS),
    "special_entr": OperationRule(inf="the entropy of a number below 0", mend=_EPS),
    "sqrt": OperationRule("the square root of a number below 0", mend=_EPS),
    "rsqrt": OperationRule("the square root of a number below 0", "1 / sqrt(0)", _EPS),
    "div": OperationRule("0 / 0", _BY_ZERO, _EPS),
    "true_divide": OperationRule("0 / 0", _BY_ZERO, _EPS),
    "floor_divide": OperationRule("0 / 0", _BY_ZERO, _EPS),
    "reciprocal": OperationRule(inf=_BY_ZERO, mend=_EPS),
    "addcdiv": OperationRule("0 / 0", _BY_ZERO, _EPS),
    "remainder": OperationRule("the remainder of a division by 0", mend=_EPS),
    "fmod": OperationRule("the remainder of a division by 0", mend=_EPS),
    "pow": OperationRule("a number below 0 to a power that is not whole", "0 to a power below 0", _EPS),
    "float_power": OperationRule("a number below 0 to a power that is not whole", "0 to a power below 0", _EPS),
    "acos": OperationRule("acos of a number beyond 1 or -1", mend=_BEYOND_1),
    "asin": OperationRule("asin of a number beyond 1 or -1", mend=_BEYOND_1),
    "acosh": OperationRule("acosh of a number below 1", mend=_EPS),
    "atanh": OperationRule("atanh of a number beyond 1 or -1", "atanh of 1 or -1", _BEYOND_1),
    "erfinv": OperationRule("erfinv of a number beyond 1 or -1", "erfinv of 1 or -1", _BEYOND_1),
    "special_ndtri": OperationRule("ndtri of a number outside of 0 to 1", "ndtri of 0 or 1", _EPS),
    "digamma": OperationRule("digamma of a whole number below 0", "digamma of 0", _EPS),
    "lgamma": OperationRule(inf="lgamma of 0 or of a whole number below 0", mend=_EPS),
    "polygamma": OperationRule("polygamma of a whole number below 1", "polygamma of a whole number below 1", _EPS),
    "exp": OperationRule(inf="exp of a number that is too large (above 88.7 in float32, 11.1 in float16)", mend=_BOUND),
    "exp2": OperationRule(inf="2 to a power that is too large (above 128 in float32, 16 in float16)", mend=_BOUND),
    "expm1": OperationRule(inf="expm1 of a number that is too large (above 88.7 in float32)", mend=_BOUND),
    "sinh": OperationRule(inf="sinh of a number that is too large (above 89.4 in float32)", mend=_BOUND),
    "cosh": OperationRule(inf="cosh of a number that is too large (above 89.4 in float32)", mend=_BOUND),
    "special_erfcx": OperationRule(inf="erfcx of a number far below 0", mend=_BOUND),
    "i0": OperationRule(inf="i0 of a number that is too large", mend="use torch.special.i0e, which is scaled"),
    "special_i1": OperationRule(inf="i1 of a number that is too large", mend="use torch.special.i1e, which is scaled"),
    "prod": _PRODUCT,
    "cumprod": _PRODUCT,
    "nll_loss_forward": _NLL,
    "nll_loss2d_forward": _NLL,
    "_ctc_loss": OperationRule(
        inf="a target that is longer than its input",
        mend="zero_infinity=True, or leave out samples whose target has more labels than frames",
    ),
    "mean": OperationRule("a mean over nothing", mend=_NOTHING),
    "nanmean": OperationRule("a mean over nothing but nan", mend=_NOTHING),
    "median": OperationRule("the median of nothing", mend=_NOTHING),
    "std": OperationRule("the deviation of fewer than two elements", mend=_FEW),
    "var": OperationRule("the variance of fewer than two elements", mend=_FEW),
    "std_mean": OperationRule("the deviation of fewer than two elements", mend=_FEW),
    "var_mean": OperationRule("the variance of fewer than two elements", mend=_FEW),
    "native_layer_norm": _NORM,
    "native_group_norm": _NORM,
    "_fused_rms_norm": _NORM,
    "_weight_norm_interface": OperationRule("0 / 0: a row of the weight is 0", mend="do not initialise it with 0"),
    "linalg_det": OperationRule(inf="a determinant beyond its dtype", mend="use torch.slogdet"),
    "_linalg_det": OperationRule(inf="a determinant beyond its dtype", mend="use torch.slogdet"),
    "_linalg_slogdet": _DET,
    "linalg_inv_ex": OperationRule(inf="the inverse of a singular matrix", mend="add an eps to its diagonal"),
    "segment_reduce": OperationRule("a mean over nothing", mend=_NOTHING),
}
"""By the name of the operation, without its namespace, its overload and the `_` of one in place."""
_GROWS = ("exp", "exp2", "expm1", "sinh", "cosh", "special_erfcx", "i0", "special_i1", "prod", "cumprod")
"""Operations whose inf may be a number that is too large for float64 as well."""


def operation_rule(operation: BadOperation) -> OperationRule:
    """That of its name; an empty one if there is none."""
    name = operation.name
    return OPERATION_RULES.get(name) or OPERATION_RULES.get(name.rstrip("_"), OperationRule())


def trial_in(trials: Sequence[CauseTrial], changed: str) -> CauseTrial | None:
    """The first trial with that changed; None if there was none, or it did not run."""
    return next((each for each in trials if each.changed == changed and each.value), None)


def outside_domain(operation: BadOperation) -> str:
    """What of its operands made a non-finite value in every dtype, in words; "" if a wider dtype has it finite, if an
    operand was not finite, or if that is not known.

    A trial in float64 decides. Without one, what the rules say holds for all finite real numbers.
    """
    if any(each.is_bad for each in operation.inputs):
        return ""
    dtypes = [each.dtype for each in (*operation.inputs, operation.output)]
    if any(dtype.startswith("complex") for dtype in dtypes):
        return ""
    rule, in_float64 = operation_rule(operation), trial_in(operation.trials, "float64")
    words = rule.nan if operation.output.value == "nan" else rule.inf
    if words == _BY_ZERO and (in_float64 is None or in_float64.value == "finite"):
        in_float32 = trial_in(operation.trials, "float32")
        is_mended = in_float32 is not None and in_float32.value == "finite"  # only of 16 bits is it tried
        return "" if is_mended and operation.output.dtype in DTYPES_OF_16_BITS else _division(operation)
    if in_float64 is not None and in_float64.value == "finite":
        return ""
    # another power that is inf is only too large
    is_of_zero = operation.handed[:1] == [0.0] or words != OPERATION_RULES["pow"].inf
    return words if is_of_zero else ""


def is_large_in_float64(operation: BadOperation) -> bool:
    """Whether its result may be a number beyond float64, too."""
    return operation.output.value != "nan" and operation.name.rstrip("_") in _GROWS


def beyond_float32(operation: BadOperation) -> str:
    """What an operation that grows fast made inf of in float32, in words; "" if another operation did, if an operand
    was not finite, or if its result was not tried, or not finite, in float64.
    """
    in_float64 = trial_in(operation.trials, "float64")
    is_finite = in_float64 is not None and in_float64.value == "finite"
    if operation.output.dtype != "float32" or not is_large_in_float64(operation) or not is_finite:
        return ""
    return "" if any(each.is_bad for each in operation.inputs) else operation_rule(operation).inf


def domain_advice(operation: BadOperation) -> str:
    """What to change where an operand was outside of the operation's domain; "" if it was not, or nobody knows."""
    words = outside_domain(operation)
    if not words or operation.node:
        return ""
    dtypes = [each.dtype for each in (*operation.inputs, operation.output)]
    half = " In float16 a number below 3e-8 is 0." if words in _OF_ZERO and "float16" in dtypes else ""
    return f"An input was outside of the operation's domain ({words}): {operation_rule(operation).mend}.{half}"


def _division(operation: BadOperation) -> str:
    """A finite quotient may be too large for its dtype as well: "" if the dividend may be large."""
    given = [each.abs_max or 0.0 for each in operation.inputs]
    if operation.op.startswith("aten.reciprocal"):
        given = [1.0, *given]
    if len(given) == 2 and given[1] == 0:
        return _BY_ZERO
    dividend = given[0] if len(given) == 2 else 2.0**63  # else one of the two is an integer
    return _OF_ZERO[-1] if dividend**2 < DTYPE_MAX.get(operation.output.dtype, 0.0) else ""
