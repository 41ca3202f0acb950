"""The cause that an operation itself is: outside of its domain, a softmax of nothing, or too large for its dtype."""

from __future__ import annotations

from ...core.codes import Certainty
from ...core.events.alarm_evidence import SAMPLES, BadOperation
from ...core.text import joined
from ...core.values import DTYPE_MAX, DTYPES_OF_16_BITS
from ..facts.diagnosis import number_text
from ..report.verdict import OverflowCause
from .cause_clues import CauseClues, odd_text
from .operation_rules import beyond_float32, domain_advice, operation_rule, trial_in

_E, _S = Certainty.ESTABLISHED, Certainty.SUPPORTED
KEEP_OPEN = (
    "A row that is -inf everywhere, of a mask or of log-probabilities of 0, makes softmax nan: keep one position open, "
    "or use torch.where."
)
_OF_CLOSED_ROWS = {
    **dict.fromkeys(
        ("softmax", "log_softmax", "logsumexp", "safe_softmax"), ("rows that are -inf throughout", KEEP_OPEN)
    ),
    "mul": (
        "-inf and 0",
        "A product with 0 does not hide a -inf, of a mask or of the logsumexp of a row that is masked throughout: use "
        "torch.where.",
    ),
    "sub": (
        "-inf and -inf",
        "A row that is -inf everywhere has -inf as its maximum and its logsumexp, and -inf minus -inf is nan: keep one "
        "position open, or use torch.where.",
    ),
}
"""By the name of the operation: what it was handed, and the mend."""


def of_domain(clues: CauseClues, operation: BadOperation, words: str) -> OverflowCause:
    """An operand was outside of what the operation is defined for."""
    in_float64 = trial_in(operation.trials, "float64")
    parts = [f"{named_with_variables(operation)}: {words}"]
    if operation.handed:
        parts[0] += f" (first element: {', '.join(f'{number:.9g}' for number in operation.handed)} in)"
    if in_float64 is not None and in_float64.value != "finite":
        parts.append(f"tried: this operation alone, on these operands, is {in_float64.value} in float64, too")
    ran = clues.ran
    odd = ran.samples if ran is not None else None
    without = trial_in(ran.trials, SAMPLES) if ran is not None else None
    is_of_samples = odd is not None and without is not None and without.value == "finite"
    if odd is not None and is_of_samples:
        parts.append(f"{odd_text(clues, odd)}, and without {'it' if len(odd.indices) == 1 else 'them'} it is finite")
    advice = domain_advice(operation)
    return OverflowCause(
        "domain",
        _E if in_float64 is not None or operation.handed else _S,
        "; ".join(parts),
        [advice] if advice else [],
        [each for each in (in_float64, without) if each is not None],
        odd if is_of_samples else None,
    )


def of_precision(operation: BadOperation) -> OverflowCause | None:
    """The same operation on its own operands is finite in a dtype that reaches further."""
    dtype = operation.output.dtype
    tried = [each for name in ("bfloat16", "float32") if (each := trial_in(operation.trials, name)) is not None]
    finite = [each for each in tried if each.value == "finite"]
    if dtype not in DTYPES_OF_16_BITS or not finite:
        return None
    found = " and ".join(f"in {each.changed} abs max {number_text(each.abs_max)}" for each in finite)
    names = " or ".join(each.changed for each in finite)
    return OverflowCause(
        "precision",
        _E,
        f"what {named(operation)} returns is too large for {dtype}, which holds at most {DTYPE_MAX[dtype]:g}; tried: "
        f"the same operation is finite {found}",
        [f"Compute this part in {names} (tried: finite), under torch.autocast(enabled=False) where autocast is on."],
        finite,
    )


def of_range(operation: BadOperation) -> OverflowCause | None:
    """It grows so fast that float32 does not hold what it makes of an ordinary number: exp above 88.7."""
    words, in_float64 = beyond_float32(operation), trial_in(operation.trials, "float64")
    if not words or in_float64 is None:
        return None
    first = f" (first element: {', '.join(f'{number:.9g}' for number in operation.handed)} in)"
    return OverflowCause(
        "domain",
        _E,
        f"{named_with_variables(operation)}: {words}{first if operation.handed else ''}; tried: this operation alone, "
        f"on these operands, is finite in float64, abs max {number_text(in_float64.abs_max)}, which float32 cannot "
        "hold",
        [f"float32 cannot hold its result: {operation_rule(operation).mend}."],
        [in_float64],
    )


def of_closed_rows(operation: BadOperation) -> OverflowCause | None:
    """The operation made nan of -inf, of which nothing else is wrong: a mask's, or a logsumexp's of a masked row.

    None if it did not. By IEEE 754 a product of numbers that are not nan is nan for 0 and inf alone, a difference for
    two infinities of one sign alone. A softmax subtracts the maximum of a row from it.
    """
    handed = {each.value for each in operation.inputs} - {"finite", ""}
    name = named(operation).strip("`")
    if operation.output.value != "nan" or handed != {"-inf"} or name not in _OF_CLOSED_ROWS:
        return None
    found, mend = _OF_CLOSED_ROWS[name]
    where = f": {operation.element}" if operation.element else ""
    return OverflowCause("mask", _E, f"{named(operation)} was handed {found}, and made nan of them{where}", [mend])


def named_with_variables(operation: BadOperation) -> str:
    """`log` of `p`; without the script's variables where they are not known."""
    handed = [f"`{name}`" for name in operation.variables]
    return f"{named(operation)}{f' of {joined(handed)}' if handed else ''}"


def named(operation: BadOperation) -> str:
    """The operation in a sentence."""
    name = operation.name.strip("_").removesuffix("_forward")
    return f"the conversion to {operation.output.dtype}" if name == "to_copy" else f"`{name}`"
