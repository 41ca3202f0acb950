"""The cause that an operation itself is: outside of its domain, a softmax of nothing, or too large for its dtype."""

from __future__ import annotations

from ...core.events import BadOperation
from ...core.values import DTYPE_MAX
from ...core.verdicts import Certainty
from ..facts.diagnosis import number_text
from ..report.model import OverflowCause
from .cause_clues import CauseClues, odd_text
from .operation_rules import domain_advice, trial_in

_E, _S = Certainty.ESTABLISHED, Certainty.SUPPORTED
_OF_16_BITS = ("float16", "bfloat16")
_OF_ROWS = ("softmax", "log_softmax", "logsumexp", "safe_softmax")
KEEP_OPEN = "A row of the mask that is -inf everywhere makes softmax nan: keep one position open, or use torch.where."


def of_domain(clues: CauseClues, operation: BadOperation, words: str) -> OverflowCause:
    """An operand was outside of what the operation is defined for."""
    in_float64 = trial_in(operation, "float64")
    tried = ""
    if in_float64 is not None and in_float64.value != "finite":
        tried = f": no dtype mends that; tried: in float64 it is {in_float64.value}, too"
    first = ""
    if operation.handed:
        first = f" (first element: {', '.join(f'{number:.4g}' for number in operation.handed)} in)"
    odd = clues.ran.samples if clues.ran is not None else None
    sample = f"; {odd_text(clues, odd)}" if odd is not None and odd.how != "large" else ""
    advice = domain_advice(operation)
    return OverflowCause(
        "domain",
        _E if in_float64 is not None or operation.handed else _S,
        f"{named(operation)} was asked for {words}{first}{tried}{sample}",
        [advice] if advice else [],
        [in_float64] if in_float64 is not None else [],
        odd if sample else None,
    )


def of_precision(clues: CauseClues, operation: BadOperation) -> OverflowCause | None:
    """The same operation on its own operands is finite in a dtype that reaches further."""
    dtype = operation.output.dtype
    tried = [each for name in ("bfloat16", "float32") if (each := trial_in(operation, name)) is not None]
    finite = [each for each in tried if each.value == "finite"]
    if dtype not in _OF_16_BITS or not finite:
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


def is_of_closed_rows(operation: BadOperation) -> bool:
    """Whether a softmax made nan of -inf alone: the maximum of a row is subtracted from it, and that was -inf."""
    handed = {each.value for each in operation.inputs} - {"finite", ""}
    return operation.output.value == "nan" and handed == {"-inf"} and named(operation).strip("`") in _OF_ROWS


def of_closed_rows(operation: BadOperation) -> OverflowCause:
    """A softmax of rows that are -inf throughout."""
    return OverflowCause(
        "mask",
        _E,
        f"{named(operation)} was handed rows that are -inf throughout, and made nan of them: {operation.element}",
        [KEEP_OPEN],
    )


def named(operation: BadOperation) -> str:
    """The operation in a sentence."""
    name = operation.op.removeprefix("aten.").partition(".")[0].strip("_")
    return f"the conversion to {operation.output.dtype}" if name == "to_copy" else f"`{name}`"
