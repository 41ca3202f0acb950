"""Operations that were given finite numbers outside of what they are defined for: no step and no scale explains that.

What is said holds for all finite real inputs: their log is nan only below 0, and their quotient only for 0 / 0. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from ...core.events import BadOperation
from ...core.values import DTYPE_MAX


class _OutsideDomain(NamedTuple):
    """What made nan, and what made inf; "" where that has other causes."""

    nan: str = ""
    inf: str = ""


_BY_ZERO = "a division by 0"
_OF_ZERO = ("the log of 0", "1 / sqrt(0)", "0 / 0", _BY_ZERO, f"{_BY_ZERO}, or by a number near 0")
_LOG = _OutsideDomain("the log of a number below 0", "the log of 0")
_OPERATIONS = {
    "log": _LOG,
    "log2": _LOG,
    "log10": _LOG,
    "log1p": _OutsideDomain("log1p of a number below -1", "log1p of -1"),
    "sqrt": _OutsideDomain("the square root of a number below 0"),
    "rsqrt": _OutsideDomain("the square root of a number below 0", "1 / sqrt(0)"),
    "div": _OutsideDomain("0 / 0", _BY_ZERO),
    "reciprocal": _OutsideDomain(inf=_BY_ZERO),
    "pow": _OutsideDomain("a number below 0 to a power that is not whole"),
    "acos": _OutsideDomain("acos of a number beyond 1 or -1"),
    "asin": _OutsideDomain("asin of a number beyond 1 or -1"),
    "acosh": _OutsideDomain("acosh of a number below 1"),
    "atanh": _OutsideDomain("atanh of a number beyond 1 or -1", "atanh of 1 or -1"),
}


def domain_advice(operation: BadOperation | None) -> str:
    """What to look at if an operation of a forward had an input outside of its domain; else ""."""
    if operation is None or operation.node or any(each.value != "finite" for each in operation.inputs):
        return ""
    name = operation.op.removeprefix("aten.").partition(".")[0].rstrip("_")
    dtypes = [each.dtype for each in (*operation.inputs, operation.output)]
    if any(dtype.startswith("complex") for dtype in dtypes):
        return ""
    asked = _OPERATIONS.get(name, _OutsideDomain())
    what = asked.nan if operation.output.value == "nan" else asked.inf
    if what == _BY_ZERO:
        what = _division(name, operation)
    if not what:
        return ""
    half = " In float16 a number below 3e-8 is 0." if what in _OF_ZERO and "float16" in dtypes else ""
    where = f"An input was outside of the operation's domain ({what})"
    return f"{where}: look at what makes it, and clamp it or add an eps.{half}"


def _division(name: str, operation: BadOperation) -> str:
    """A finite quotient may be too large for its dtype as well: "" if the dividend may be large."""
    given = [each.abs_max or 0.0 for each in operation.inputs]
    if name == "reciprocal":
        given = [1.0, *given]
    if len(given) == 2 and given[1] == 0:
        return _BY_ZERO
    dividend = given[0] if len(given) == 2 else 2.0**63  # else one of the two is an integer
    return _OF_ZERO[-1] if dividend**2 < DTYPE_MAX.get(operation.output.dtype, 0.0) else ""
