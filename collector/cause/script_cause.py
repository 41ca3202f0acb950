"""The cause where no module made a non-finite value: the script's own variables, and their lines. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePath

import msgspec

from ...core.codes import Certainty
from ...core.events.read_tensors import ScriptTensor
from ...core.values import DTYPE_MAX, DTYPES_OF_16_BITS
from ..facts.diagnosis import number_text
from ..facts.log_traceback import is_of_script
from ..facts.rank_facts import RankFacts
from ..report.verdict import OverflowCause
from .derivative_rules import derivative_cause, operation_of_node
from .operation_rules import OPERATION_RULES

_MOST_TOLD = 3
_OF_FEW = ("std", "var", "std_mean", "var_mean")
"""Not finite for fewer than two elements."""
_OF_NONE = ("mean", "nanmean", "median")
"""Not finite for no element."""
_NODE_TEXT = re.compile(r"Function '(\w+)' returned nan values in its \d+th output")


def cause_in_script(tensors: Sequence[ScriptTensor], lead: str = "") -> OverflowCause | None:
    """The variable that became bad first, as far as the lines tell; None if none that counts is bad.

    `lead`: what is known beside it, a clause that ends in a semicolon.
    """
    bad = [each for each in tensors if each.is_bad]
    first = _first_made(bad)
    if first is None:
        return None
    others = [f"`{each.name}`" for each in bad if each.counts and each.name != first.name][:_MOST_TOLD]
    handed = [each for each in tensors if _variable(each) in first.uses and each.function == first.function]
    finite = [each for each in handed if each.numbers.value == "finite"]
    finite = [each for each in finite if "[" not in each.name or each.numbers.abs_max == 0][:_MOST_TOLD]
    sizes = [_size_text(each) for each in finite]
    also = [f"so {'is' if len(others) == 1 else 'are'} {', '.join(others)}"] if others else []
    function = f" of `{first.function}`" if first.function != "<module>" else ""
    place = f" (assigned at {_place(first)}: `{first.code}`)" if first.line else ""
    behind = [f"`{name}`" for node in first.nodes if (name := operation_of_node(node))]
    if behind:
        also.append(
            f"{' and '.join(behind)} in its graph {'was' if len(behind) == 1 else 'were'} handed "
            "numbers outside of the domain"
        )
    said = "; ".join([f"variable `{first.name}`{function} is {first.numbers.value}{place}", *also, *sizes])
    kind, steps = _kind_and_steps(first, handed)
    return OverflowCause(kind, Certainty.SUPPORTED, f"{lead}{said}", steps)


def not_handed_on(tensors: Sequence[ScriptTensor]) -> list[ScriptTensor]:
    """Without those of an installed package that only hands a loss on, as the loop of a framework does."""
    return [
        each
        for each in tensors
        if is_of_script(each.file) or each.nodes or any(name in OPERATION_RULES for name in each.ops)
    ]


def variable_in_script(tensors: Sequence[ScriptTensor]) -> str:
    """The variable that became bad first, as a clause: "`adv`, assigned at train.py:12, was nan"; "" if unknown."""
    first = _first_made([each for each in tensors if each.is_bad])
    known = first is not None and first.line
    return f"`{first.name}`, assigned at {_place(first)}, was {first.numbers.value}" if first and known else ""


def _variable(tensor: ScriptTensor) -> str:
    return tensor.name.partition("[")[0]


def _place(tensor: ScriptTensor) -> str:
    return f"{PurePath(tensor.file).name}:{tensor.line}"


def _size_text(tensor: ScriptTensor) -> str:
    size = tensor.numbers.abs_max
    return f"`{tensor.name}` is all zero" if size == 0 else f"`{tensor.name}` has abs max {number_text(size)}"


def _kind_and_steps(first: ScriptTensor, handed: Sequence[ScriptTensor]) -> tuple[str, list[str]]:
    is_nan, dtype = first.numbers.value == "nan", first.numbers.dtype
    behind = [name for node in first.nodes if (name := operation_of_node(node)) in OPERATION_RULES]
    names, where = behind or _suspects(first, handed), "In its graph" if behind else "In that line"
    steps = []
    for name in names:
        rule = OPERATION_RULES[name]
        words = " or ".join(filter(None, (rule.nan, rule.inf))) if is_nan else rule.inf
        steps.append(f"{where} look at `{name}` ({words}): {rule.mend}. Not tried.")
    if names:
        return ("domain" if len(names) == 1 else "script"), steps
    if not is_nan and dtype in DTYPES_OF_16_BITS:
        limit = f"{dtype} holds at most {DTYPE_MAX[dtype]:g}"
        return "precision", [f"{limit}: compute that line in float32. Not tried."]
    at = f" at {_place(first)}, or changes it after that" if first.line else ""
    return "script", [f"Look at what computes `{first.name}`{at}."]


def _suspects(first: ScriptTensor, handed: Sequence[ScriptTensor]) -> list[str]:
    """The operations of the line that can have made the value, those that its shapes point at alone."""
    is_nan = first.numbers.value == "nan"
    known = [name for name in first.ops if name in OPERATION_RULES]
    able = [name for name in known if (OPERATION_RULES[name].nan if is_nan else OPERATION_RULES[name].inf)]
    sizes = [math.prod(each.numbers.shape or ()) for each in (first, *handed)]
    of_few = [name for name in able if name in _OF_FEW and min(sizes) <= 1]
    of_none = [name for name in able if name in _OF_NONE and min(sizes) == 0]
    if of_few or of_none:
        return of_few or of_none
    return [name for name in able if name not in (*_OF_FEW, *_OF_NONE, "pow")]


def _first_made(bad: Sequence[ScriptTensor]) -> ScriptTensor | None:
    """From a variable that counts back along the lines, as long as one that a line uses is bad, too."""
    ends = [each for each in bad if each.counts]
    first = next((each for each in ends if each.line), ends[0] if ends else None)
    known = {id(first)}
    while first is not None:
        inner = [each for each in bad if each.function == first.function and id(each) not in known]
        used = next((each for each in inner if _variable(each) in first.uses), None)
        if used is None:
            return first
        known.add(id(used))
        first = used
    return None


def cause_between(rank: RankFacts, step: int, elements: int) -> OverflowCause | None:
    """The cause where the script changes gradients before it hands them on: a variable of as many elements is bad."""
    script = next((each.again.script for each in rank.anomalies if each.again and each.where.step == step), [])
    alike = ((each, math.prod(each.numbers.shape or ()) == elements) for each in script)
    handed = [msgspec.structs.replace(each, counts=same and each.numbers.value != "-inf") for each, same in alike]
    found = cause_in_script(handed)
    return msgspec.structs.replace(found, kind="hook") if found is not None else None


def cause_of_crash(rank: RankFacts) -> OverflowCause | None:
    """The cause of an exception that speaks of nan, or of sys.exit while a variable of the script is nan."""
    error = rank.error
    if error is not None:
        node = _NODE_TEXT.search(error.message)
        if node is not None:
            return derivative_cause(node[1])
        return cause_in_script(error.tensors)
    return cause_in_script(rank.script_exit.tensors) if rank.script_exit is not None else None
