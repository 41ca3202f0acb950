"""The variable whose tensor a backward began from, by the script's sources alone: its number arrives later.

loss = criterion(model(x), y)     the line that is told
self.manual_backward(loss)        handed on
def manual_backward(self, loss):
    loss.backward()               where the backward began
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from types import CodeType, FrameType

import torch

from ...core.events.read_tensors import OperandNumbers, ScriptTensor
from ..record.autograd_graph import outwards
from .code_place import CallSite, function_name
from .script_lines import source_of_code


def loss_variable(
    sites: Sequence[CallSite], numbers: OperandNumbers, nodes: list[str]
) -> tuple[ScriptTensor, CallSite] | None:
    """(the variable that `backward` was called on at the first of these sites, that of them where it was handed on).

    None if that is not certain. `numbers`: of its tensor. `nodes`: those of its graph outside of their domain.
    """
    callee: CodeType | None = None
    asked = ""
    for site in sites:
        source, line = source_of_code(site.f_code), site.f_lineno
        called = callee.co_name if callee is not None else "backward"
        calls = source.calls_at(line, called) if source is not None else []
        given = _handed_in(calls[0], callee, asked) if len(calls) == 1 else None
        if source is None or not isinstance(given, ast.Name):
            return None
        if not source.is_handed(given.id):
            at, code = source.assigned(given.id, line), site.f_code
            known = ScriptTensor(given.id, function_name(code), code.co_filename, *at, numbers, nodes, True)
            # without a line: a module of this name, perhaps, as in `autograd.backward(loss)`
            return (known, site) if at.line else None
        callee, asked = site.f_code, given.id
    return None


def still_holds(told: ScriptTensor, site: CallSite, loss: torch.Tensor, frame: FrameType) -> bool:
    """Whether the function of a variable still runs, behind the line that began the backward, with the loss in it.

    Then what it assigned before has the same values as then. `frame`: the innermost that runs.
    """
    runs = outwards(frame, lambda each: each.f_code is site.f_code)
    return runs is not None and runs.f_lineno >= site.f_lineno and runs.f_locals.get(told.name) is loss


def _handed_in(call: ast.Call, callee: CodeType | None, argument: str) -> ast.expr | None:
    """What a call hands to this argument of the function with this code; without one, what `backward` is called on."""
    if callee is None:
        on_tensor = isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, ast.Attribute)
        return call.func.value if on_tensor and isinstance(call.func, ast.Attribute) else None
    named = [each.value for each in call.keywords if each.arg == argument]
    if named or any(isinstance(each, ast.Starred) for each in call.args):
        return named[0] if len(named) == 1 else None
    arguments = list(callee.co_varnames[: callee.co_argcount])
    if argument not in arguments:
        return None
    source = source_of_code(callee)
    in_class = source is not None and source.is_method
    is_method = isinstance(call.func, ast.Attribute) and (in_class or arguments[0] in ("self", "cls"))
    if in_class and not _is_of_object(call.func):
        return None  # it may be handed the object, too
    place = arguments.index(argument) - is_method
    return call.args[place] if 0 <= place < len(call.args) else None


def _is_of_object(called: ast.expr) -> bool:
    """Whether a method is asked of an object: `engine.backward`, and neither `Engine.backward` nor `backward`."""
    if not isinstance(called, ast.Attribute):
        return False
    holder = called.value
    name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
    return not name[:1].isupper()
