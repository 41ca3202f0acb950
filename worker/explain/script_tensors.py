"""Tensors among the local variables of the script that hold nan or inf, and the lines that assign them.

Read where a backward begins from a bad loss, and where the script ends with an exception that speaks of nan or with
sys.exit: what made the value is no module's, and no frame of a module shows it. Names are kept, and no contents.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from linecache import getline, getlines
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from ...core.events import ScriptTensor
from ...core.signal_errors import suppress_own
from ..device.device import is_at_rest, without_modes
from .operands import has_numbers, numbers_of
from .operation_watch import is_users_file
from .saved_operands import outside_domain

_MOST_TENSORS = 64
_MOST_KEPT = 16
_MOST_ELEMENTS = 1 << 28
"""Of all that are read."""
_MOST_ITEMS = 32
_MOST_FRAMES = 8
_MOST_LINES = 20_000
_SPEAKS_OF_NAN = re.compile(
    r"\b(nan|inf|infinite|infinity|non-?finite|not finite|invalid numeric|overflow\w*)\b", re.IGNORECASE
)
_IS_WRITTEN = re.compile(r"\b(inf|nan|infinity)\b", re.IGNORECASE)
"""A variable whose line writes such a number began with it: `best = torch.tensor(float("inf"))`."""
_OPERATORS: dict[type[ast.operator], str] = {ast.Div: "div", ast.Pow: "pow", ast.Mod: "remainder"}

RunningFrame = tuple[FrameType, int]
"""(a frame, the line that it is in)"""


def speaks_of_nan(text: str) -> bool:
    """Whether a message is about a number that is not finite."""
    return _SPEAKS_OF_NAN.search(text) is not None


def frames_of(trace: TracebackType | None) -> list[RunningFrame]:
    """Those of a traceback, the innermost first."""
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found[::-1]


def running_frames(frame: FrameType | None) -> list[RunningFrame]:
    """A frame and its callers, the innermost first."""
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found


def script_tensors(frames: Iterable[RunningFrame], *, waits: bool) -> list[ScriptTensor]:
    """The tensors among the local variables of the script's own functions, if one of them holds nan or inf; else [].

    Bad ones first. Raises nothing of its own. `waits`: for the device; else what is on one that is at work is left out.
    """
    with suppress_own(Exception):
        return without_modes(_script_tensors, frames, waits)
    return []


def _script_tensors(frames: Iterable[RunningFrame], waits: bool) -> list[ScriptTensor]:
    own = [each for each in frames if is_users_file(each[0].f_code.co_filename)][:_MOST_FRAMES]
    found: list[ScriptTensor] = []
    read = elements = 0
    for frame, line in own:
        for name, tensor in _tensors_in(frame):
            if read == _MOST_TENSORS or elements + tensor.numel() > _MOST_ELEMENTS:
                break
            if not waits and not is_at_rest(tensor.device):
                continue
            read, elements = read + 1, elements + tensor.numel()
            numbers, _ = numbers_of(tensor)
            if numbers.value:
                nodes = outside_domain(tensor) if numbers.value not in ("finite", "-inf") else []
                at = _assigned(frame, name.partition("[")[0], line)
                function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # since Python 3.11
                found.append(ScriptTensor(name, function, frame.f_code.co_filename, *at, numbers, nodes))
    bad = [each for each in found if each.numbers.value not in ("finite", "-inf") and not _IS_WRITTEN.search(each.code)]
    finite = [each for each in found if each.numbers.value == "finite"]
    return [*bad, *finite][:_MOST_KEPT] if bad else []


def _tensors_in(frame: FrameType) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor): `loss`, or `grads[1]` for one in a short list."""
    for name, value in list(frame.f_locals.items()):
        if isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
            found = [(f"{name}[{at}]", each) for at, each in enumerate(value)]
        else:
            found = [(name, value)]
        for known, each in found:
            if type(each) is torch.Tensor and has_numbers(each) and 0 < each.numel() <= _MOST_ELEMENTS:
                yield known, each


# The line that assigns a variable.


class AssignedLine(NamedTuple):
    """Where a variable was assigned last, as far as its source tells. Line 0: unknown."""

    line: int
    code: str
    uses: list[str]
    """Names on its right side."""
    ops: list[str]
    """Functions, methods and operators there: `std`, `div`."""


def _assigned(frame: FrameType, name: str, line: int) -> AssignedLine:
    """The last assignment of a variable above a line of its function, or the last one where a loop comes round."""
    file = frame.f_code.co_filename
    tree = _parsed(file)
    if tree is None:
        return AssignedLine(0, "", [], [])
    begin = frame.f_code.co_firstlineno
    functions = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    of_module = frame.f_code.co_name == "<module>"
    function = tree if of_module else next((each for each in functions if _first_line(each) == begin), None)
    if function is None:
        return AssignedLine(0, "", [], [])
    places = sorted(((each.lineno, value) for each, value in _assignments(function, name)), key=lambda each: each[0])
    above = [each for each in places if each[0] <= line] or places
    if not above:
        return AssignedLine(0, "", [], [])
    at, value = above[-1]
    names = list(dict.fromkeys(each.id for each in ast.walk(value) if isinstance(each, ast.Name)))
    return AssignedLine(at, getline(file, at).strip(), names, list(dict.fromkeys(_operations(value))))


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def _assignments(function: ast.AST, name: str) -> Iterator[tuple[Any, ast.expr]]:
    """Where a name is bound. `x /= 2` changes what it is bound to, which may have been bad before."""
    for each in ast.walk(function):
        if isinstance(each, ast.AugAssign):
            continue
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        value = getattr(each, "iter" if isinstance(each, ast.For) else "value", None)
        if value is not None and any(_holds(target, name) for target in targets):
            yield each, value


def _holds(target: ast.AST | None, name: str) -> bool:
    return target is not None and any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(target))


def _operations(value: ast.expr) -> Iterator[str]:
    for each in ast.walk(value):
        if isinstance(each, ast.BinOp) and type(each.op) in _OPERATORS:
            yield _OPERATORS[type(each.op)]
        elif isinstance(each, ast.Call):
            function = each.func
            yield function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@lru_cache(8)
def _parsed(file: str) -> ast.AST | None:
    lines = getlines(file)
    if not lines or len(lines) > _MOST_LINES:
        return None
    with suppress_own(SyntaxError):  # of a notebook's cell with a magic, or of a file that has changed
        return ast.parse("".join(lines))
    return None
