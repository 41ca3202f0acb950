"""What the source of a function says of its variables: the line that assigns one, and those that a line depends on.

A line is told only if it is certain: the last one above that binds the name, in a block that runs on to the line where
the variable is read, and nothing changes the variable in between. Else there is none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from linecache import getline, getlines
from types import CodeType, FrameType
from typing import NamedTuple

from ...core.signal_errors import suppress_own

_MOST_LINES = 20_000
_ORDINARY = 1e3
_MOST_FOLLOWED = 3
"""Assignments from a line back: `loss` of `value = loss.item()` of `if not isfinite(value)`."""
_OPERATORS: dict[type[ast.operator], str] = {ast.Div: "div", ast.Mod: "remainder"}
_LISTS_CHANGE = frozenset({"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"})
_PARTS = ("body", "orelse", "finalbody", "handlers", "cases")
_Block = tuple[int, str]
"""(id of the statement around, which of its blocks)"""


class AssignedLine(NamedTuple):
    """Where a variable was assigned. Line 0: not known for certain."""

    line: int
    code: str
    uses: list[str]
    """Names on its right side."""
    ops: list[str]
    """Functions, methods and operators there: `std`, `div`."""


_UNKNOWN = AssignedLine(0, "", [], [])


class _VariableBinding(NamedTuple):
    statement: ast.stmt
    block: _Block
    value: ast.expr | None
    """None: it changes the variable in a way that is not followed."""
    within: list[_Block]
    """All blocks that it is in."""

    @property
    def line(self) -> int:
        return self.statement.lineno


class FunctionSource:
    """The source of one function, or of a module."""

    def __init__(self, node: ast.AST, file: str, is_method: bool = False) -> None:
        self.node, self._file, self.is_method = node, file, is_method
        """`is_method`: it stands in a class, and is not static."""
        self._blocks: dict[int, list[_Block]] = {}
        """id of a statement -> the blocks that it is in, the innermost first"""
        self._statements: list[ast.stmt] = []
        self._loops: set[_Block] = set()
        self._tests: dict[int, list[ast.expr]] = {}
        """id of a statement -> the conditions around it"""
        self._shared: set[str] = set()
        """Names that a function within this one may assign."""
        self._walk(node, [], [])

    def _walk(self, node: ast.AST, blocks: list[_Block], tests: list[ast.expr]) -> None:
        for name in _PARTS:
            for each in getattr(node, name, None) or ():
                is_within = isinstance(node, ast.With | ast.AsyncWith)  # what stands in it runs whenever it does
                inner, conditions = (blocks if is_within else [(id(node), name), *blocks]), tests
                if isinstance(node, ast.For | ast.AsyncFor | ast.While):
                    self._loops.add((id(node), name))
                if isinstance(node, ast.If | ast.While):
                    conditions = [node.test, *tests]
                if isinstance(each, ast.stmt):
                    self._statements.append(each)
                    self._blocks[id(each)], self._tests[id(each)] = inner, conditions
                if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    self._walk(each, inner, conditions)
                    continue
                inside = (part for part in ast.walk(each) if isinstance(part, ast.Global | ast.Nonlocal))
                self._shared.update(name for part in inside for name in part.names)

    def assigned(self, name: str, line: int) -> AssignedLine:
        """The line that assigned `name` as the statement at `line` reads it."""
        last = self._binding_at(name, line)
        if last is None or last.value is None:
            return _UNKNOWN
        uses = list(dict.fromkeys(each.id for each in ast.walk(last.value) if isinstance(each, ast.Name)))
        ops = list(dict.fromkeys(_operations(last.value)))
        return AssignedLine(last.line, getline(self._file, last.line).strip(), uses, ops)

    def value_of(self, name: str, line: int) -> ast.expr | None:
        """The right side of that line; None if it is not known for certain, or a variable that it reads was assigned or
        deleted since."""
        binding = self._binding_at(name, line)
        if binding is None or binding.value is None:
            return None
        read = {each.id for each in ast.walk(binding.value) if isinstance(each, ast.Name)}
        changed = any(each.line >= binding.line for name in read for each in self._bindings(name))
        return None if changed else binding.value

    def is_handed(self, name: str) -> bool:
        """Whether it is an argument of the function, and is not assigned in it."""
        given = self.node.args if isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef) else None
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs] if given is not None else []
        is_own = name not in self._shared and next(self._bindings(name), None) is None
        return is_own and any(each.arg == name for each in named)

    def _binding_at(self, name: str, line: int) -> _VariableBinding | None:
        use = self.statement_at(line)
        if use is None or name in self._shared:
            return None
        bindings, around = list(self._bindings(name)), self._blocks[id(use)]
        last = max((each for each in bindings if each.line < use.lineno), key=lambda each: each.line, default=None)
        if last is None or last.block not in around:
            return None
        # a loop around the use that does not begin with this line may come round from another one below; so may the
        # use itself, if it is the first line of a loop
        loops = set(around[: around.index(last.block)]) & self._loops | {(id(use), "body")}
        if any(each.line >= use.lineno and loops & set(each.within) for each in bindings):
            return None
        beside = (each for each in bindings if each.line == use.lineno)
        return last if all(each.statement is use and _assigns(use, name) for each in beside) else None

    def names_at(self, line: int) -> set[str]:
        """Names that the statement at a line and the conditions around it depend on."""
        statement = self.statement_at(line)
        if statement is None:
            return set()
        parts: list[ast.AST] = [*self._tests[id(statement)]]
        is_simple = not holds_others(statement)
        parts += [statement] if is_simple else [getattr(statement, "test", ast.Constant(0))]
        found = {each.id for part in parts for each in ast.walk(part) if isinstance(each, ast.Name)}
        left = set(found)
        for _ in range(_MOST_FOLLOWED):
            left = {use for name in left for use in self.assigned(name, line).uses} - found
            found |= left
        return found

    def statement_at(self, line: int) -> ast.stmt | None:
        """The innermost statement at a line; of several beside each other the last one."""
        return max(self._at(line), key=lambda each: (each.lineno, each.col_offset), default=None)

    def calls_at(self, line: int, name: str) -> list[ast.Call]:
        """The calls of this name in the statements at a line that hold no others."""
        simple = [each for each in self._at(line) if not holds_others(each)]
        calls = (each for statement in simple for each in ast.walk(statement) if isinstance(each, ast.Call))
        return [each for each in calls if called_name(each) == name]

    def _at(self, line: int) -> list[ast.stmt]:
        return [each for each in self._statements if each.lineno <= line <= (each.end_lineno or each.lineno)]

    def _bindings(self, name: str) -> Iterator[_VariableBinding]:
        for each in self._statements:
            block = self._blocks[id(each)][0]
            if isinstance(each, ast.For | ast.AsyncFor) and _binds(each.target, name):
                yield _VariableBinding(each, (id(each), "body"), each.iter, self._blocks[id(each)])
                continue
            if isinstance(each, ast.Assign | ast.AnnAssign) and _assigns(each, name):
                yield _VariableBinding(each, block, getattr(each, "value", None), self._blocks[id(each)])
            elif _changes(each, name) and not _scales(each, name):
                yield _VariableBinding(each, block, None, self._blocks[id(each)])


def holds_others(statement: ast.stmt) -> bool:
    """Whether other statements stand in this one."""
    return any(isinstance(getattr(statement, name, None), list) for name in _PARTS)


def _assigns(statement: ast.stmt, name: str) -> bool:
    """Whether a statement assigns a variable, as its last act: `x = x / 2`, and not `[print(x) for x in y]`."""
    targets = (
        statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", ast.Constant(0))]
    )
    return any(_binds(target, name) for target in targets)


def _scales(statement: ast.stmt, name: str) -> bool:
    """Whether it is `g /= 2`: a number of ordinary size makes no nan of a finite tensor."""
    if not isinstance(statement, ast.AugAssign) or not _binds(statement.target, name):
        return False
    number = getattr(statement.value, "value", None)
    return isinstance(number, int | float) and 0 < abs(number) <= _ORDINARY


def _binds(target: ast.expr, name: str) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return any(_binds(each, name) for each in target.elts)
    return isinstance(target, ast.Name) and target.id == name


def _holds(target: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(target))


def _changes(statement: ast.stmt, name: str) -> bool:
    """Whether a statement, without those inside of it, may change what a variable holds: `x[0] = 1`, `x.add_(1)`,
    `x.append(1)`, `del x`."""
    parts: list[ast.AST] = [statement]
    if holds_others(statement):
        parts = [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.expr | ast.withitem)]
    if isinstance(statement, ast.Match):
        parts += [each.pattern for each in statement.cases]
    for part in parts:
        for each in ast.walk(part):
            if isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store | ast.Del):
                return True
            is_part = isinstance(each, ast.Subscript | ast.Attribute) and isinstance(each.ctx, ast.Store | ast.Del)
            if is_part and _holds(each.value, name):  # type: ignore[attr-defined]
                return True
            if isinstance(each, ast.MatchAs | ast.MatchStar) and each.name == name:
                return True
            if isinstance(each, ast.MatchMapping) and each.rest == name:
                return True
            is_method = isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)
            if is_method and _is_in_place(each.func.attr) and _holds(each.func.value, name):  # type: ignore[attr-defined]
                return True
    return False


def _is_in_place(method: str) -> bool:
    return method.endswith("_") or method in _LISTS_CHANGE


def _operations(value: ast.expr) -> Iterator[str]:
    for each in ast.walk(value):
        if isinstance(each, ast.BinOp) and type(each.op) in _OPERATORS:
            yield _OPERATORS[type(each.op)]
        elif isinstance(each, ast.Call):
            yield called_name(each)


def called_name(call: ast.Call) -> str:
    """`exp` of `torch.exp(x)` and of `x.exp()`; "" if it has none."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def source_of(frame: FrameType) -> FunctionSource | None:
    """The source of the function that a frame runs; None if it is not to be had."""
    return source_of_code(frame.f_code)


def source_of_code(code: CodeType) -> FunctionSource | None:
    """Likewise, of the function with this code."""
    return _source(code.co_filename, code.co_firstlineno if code.co_name != "<module>" else 0)


@lru_cache(32)
def _source(file: str, begin: int) -> FunctionSource | None:
    tree = _parsed(file)
    if tree is None or not begin:
        return FunctionSource(tree, file) if tree is not None else None
    functions = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    found = next((each for each in functions if _first_line(each) == begin), None)
    if found is None:
        return None
    is_static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in found.decorator_list)
    in_class = any(found in each.body for each in ast.walk(tree) if isinstance(each, ast.ClassDef))
    return FunctionSource(found, file, in_class and not is_static)


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


@lru_cache(8)
def _parsed(file: str) -> ast.AST | None:
    lines = getlines(file)
    if not lines or len(lines) > _MOST_LINES:
        return None
    with suppress_own(SyntaxError):  # of a notebook's cell with a magic, or of a file that has changed
        return ast.parse("".join(lines))
    return None
