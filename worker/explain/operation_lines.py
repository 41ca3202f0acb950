"""The line of the script that has run an operation, by its sources alone: the function that ran it has returned.

    loss = criterion(model(x), y)     the statement that is known to have led to it
    def criterion(a, b):
        d = a - b
        return (d ** 2).mean()        the line of `pow`

If the statement itself has the operation, that is the line. Else the functions of the script that it calls are looked
into. There a line is told only if no other one can have run the operation: each call must lead to a function that can
be looked into, or be known to run other operations alone.
"""

from __future__ import annotations

import ast
import builtins
from collections import deque
from collections.abc import Callable, Iterable
from linecache import getline
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core.signal_errors import from_outside
from .code_place import is_users_file
from .node_operations import ELEMENTWISE
from .script_lines import called_name, source_of_code

_MOST_DEPTH = 3
_OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("add",),
    ast.Sub: ("sub", "rsub"),
    ast.Mult: ("mul",),
    ast.Div: ("div", "reciprocal", "mul"),
    ast.Mod: ("remainder",),
    ast.Pow: ("pow",),
    ast.MatMult: ("mm", "bmm", "mv", "dot", "addmm"),
}
_RUNS = {
    **{"square": ("pow",), "divide": ("div",), "true_divide": ("div",), "multiply": ("mul",), "subtract": ("sub",)},
    **{"matmul": ("mm", "bmm", "mv", "dot"), "linear": ("addmm", "mm", "add"), "sum": ("add",)},
    **{"softmax": ("_softmax",), "log_softmax": ("_log_softmax",), "nll_loss": ("nll_loss_forward",)},
    "cross_entropy": ("_log_softmax", "nll_loss_forward", "nll_loss2d_forward", "sum", "mul", "add", "div", "mean"),
}
"""The operations of aten that a call of this name runs, beside one of its own name."""
_COMPUTE = """
    abs logsumexp pow xlogy add sub mul div mm bmm dot sign where clamp clamp_min maximum minimum max min mean
    prod amax amin cumsum cumprod std var mse_loss smooth_l1_loss huber_loss masked_fill gather index_select
"""
_MOVE = """
    cat stack clone view reshape flatten squeeze unsqueeze permute transpose t expand expand_as contiguous detach float
    half double bfloat16 to type_as size dim numel item zeros_like ones_like zeros ones full arange tensor backward
    chunk split unbind eq ne lt le gt ge isfinite len range int zip enumerate print isinstance tuple list dict
"""
_KNOWN = frozenset({*_RUNS, *ELEMENTWISE, *_COMPUTE.split(), *_MOVE.split()})
"""Names of calls of which it is known what they run: the operation of that name, and those of `_RUNS`."""

Scope = Callable[[str], Any]
"""What a name stands for; `_UNKNOWN` if that is not known."""
_UNKNOWN = object()
_PLAIN = (ModuleType, FunctionType, BuiltinFunctionType, type, str, bytes, int, float, NoneType)
_LISTS = (list, tuple, set, deque)
_MOST_OBJECTS = 100_000
_MOST_TENSORS = 256
"""What is looked at of an object: one that keeps more may keep anything."""


class OperationLine(NamedTuple):
    """A line of the script."""

    file: str
    line: int
    code: str


def _line_at(file: str, line: int) -> OperationLine:
    return OperationLine(file, line, getline(file, line).strip())


def _lines(operation: str, node: ast.AST) -> set[int]:
    """The lines within a piece of source that have the operation."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.BinOp | ast.AugAssign) and operation in _OPERATORS.get(type(each.op), ()):
            found.add((each.right if isinstance(each, ast.BinOp) else each.value).lineno)
        elif isinstance(each, ast.Call):
            name = _name_of(each)
            if operation == name or operation in _RUNS.get(name, ()):
                found.add(each.func.end_lineno or each.lineno)
    return found


def _name_of(call: ast.Call) -> str:
    """Without the `_` of one in place."""
    name = called_name(call)
    return name.removesuffix("_") if not name.endswith("__") else name


class LineSearch:
    """A search for the line of one operation, such as `pow`, from one statement.

    `is_result`: whether a tensor was computed from what it returned. `is_read`: whether a module's output was read, and
    finite. `running`: the functions that run now, called from that of the statement: they have not run it.
    """

    def __init__(
        self,
        operation: str,
        is_result: Callable[[torch.Tensor], bool],
        is_read: Callable[[nn.Module], bool],
        running: Iterable[CodeType] = (),
    ) -> None:
        self._operation = operation
        self._is_result, self._is_read = is_result, is_read
        self._looked_into = set(running)
        self._found: set[tuple[str, int]] = set()
        self._is_open = False
        """A call may lead anywhere, or the operation has run before."""

    def line_in(self, statement: ast.stmt | ast.expr, frame: FrameType) -> OperationLine | None:
        """The line that has run the operation: `statement` of the function that `frame` runs led to it."""
        file, scope = frame.f_code.co_filename, _scope_of(frame.f_locals, frame.f_globals)
        self._reads(statement, scope)
        own = _lines(self._operation, statement)
        if not own:
            self._calls(statement, scope, 0)
        if self._is_open or len(self._found) + bool(own) != 1:
            return None
        if own:
            return _line_at(file, own.pop() if len(own) == 1 else statement.lineno)
        return _line_at(*self._found.pop())

    def _reads(self, node: ast.AST, scope: Scope) -> None:
        """Look at what a piece of source reads: a tensor that an object keeps may have been computed before."""
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load) and not self._is_open:
                self._is_open = self._keeps_result(scope(each.id))

    def _keeps_result(self, value: Any) -> bool:
        """Whether an object is, or keeps, a tensor that was computed from the operation's result."""
        left, seen, asked = [value], set[int](), 0
        while left:
            each = left.pop()
            if isinstance(each, _PLAIN) or each is _UNKNOWN or id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, torch.Tensor):
                asked += each.grad_fn is not None
                if asked > _MOST_TENSORS or (each.grad_fn is not None and self._is_result(each)):
                    return True
                continue
            # of dict itself: a class of the script's may compute its values
            held = dict.values(each) if isinstance(each, dict) else each if type(each) in _LISTS else ()
            if len(seen) + len(held) > _MOST_OBJECTS:
                return True
            left += [*held, *_attributes_of(each).values()]
        return False

    def _calls(self, node: ast.AST, scope: Scope, depth: int) -> None:
        """Look into the functions that are called in a piece of source."""
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                self._called(each, scope, depth)

    def _called(self, call: ast.Call, scope: Scope, depth: int) -> None:
        called = _resolved(call.func, scope)
        if isinstance(called, nn.Module):
            self._is_open = self._is_open or not self._is_read(called)
            return
        itself = called.__self__ if isinstance(called, MethodType) else _UNKNOWN
        function = called.__func__ if isinstance(called, MethodType) else called
        if isinstance(function, FunctionType) and is_users_file(function.__code__.co_filename):
            self._look_into(function, itself, depth + 1)
        elif _name_of(call) not in _KNOWN:
            self._is_open = True

    def _look_into(self, function: FunctionType, itself: Any, depth: int) -> None:
        code = function.__code__
        if code in self._looked_into:
            return
        self._looked_into.add(code)
        source = source_of_code(code) if depth <= _MOST_DEPTH else None
        if source is None or getattr(source.node, "name", "") != code.co_name:  # a lambda
            self._is_open = True
            return
        self._is_open |= self._keeps_result([function.__defaults__, function.__kwdefaults__])
        known = {code.co_varnames[0]: itself} if itself is not _UNKNOWN and code.co_argcount else {}
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        outer = {name: _held(cell) for name, cell in cells}
        own: dict[str, Any] = dict.fromkeys(code.co_varnames, _UNKNOWN)
        scope = _scope_of({**outer, **own, **known}, function.__globals__)
        self._found |= {(code.co_filename, line) for line in _lines(self._operation, source.node)}
        self._reads(source.node, scope)
        self._calls(source.node, scope, depth)


def _attributes_of(holder: Any) -> dict[str, Any]:
    try:
        held = object.__getattribute__(holder, "__dict__")
    except AttributeError as error:  # it has slots
        if from_outside(error):
            raise
        return {}
    return held if isinstance(held, dict) else {}


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError as error:  # it is empty
        if from_outside(error):
            raise
        return _UNKNOWN


def _scope_of(local: dict[str, Any], outer: dict[str, Any]) -> Scope:
    def value_of(name: str) -> Any:
        for table in (local, outer, vars(builtins)):
            if name in table:
                return table[name]
        return _UNKNOWN

    return value_of


def _resolved(node: ast.expr, scope: Scope) -> Any:
    """What an expression stands for, where that is known without running any of the script's code."""
    if isinstance(node, ast.Name):
        return scope(node.id)
    if not isinstance(node, ast.Attribute):
        return _UNKNOWN
    holder = _resolved(node.value, scope)
    if isinstance(holder, ModuleType):
        return vars(holder).get(node.attr, _UNKNOWN)
    if holder is _UNKNOWN:
        return _UNKNOWN
    made = next((vars(cls)[node.attr] for cls in type(holder).__mro__ if node.attr in vars(cls)), _UNKNOWN)
    held = _attributes_of(holder)
    for table in (held, held.get("_modules") or {} if isinstance(holder, nn.Module) else {}):
        if node.attr in table:
            return table[node.attr]
    return MethodType(made, holder) if isinstance(made, FunctionType) else _UNKNOWN
