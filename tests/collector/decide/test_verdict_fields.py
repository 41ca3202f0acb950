"""A field of report.json's verdict that one kind of verdict alone has is set by rules of that kind alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import TypeGuard

from gpuwatch.collector.report.verdict import Verdict

from ...core.test_imports import ROOT
from ...parsed import nodes_of

OF_OVERFLOW = ("role", "value", "dtype", "between", "seen_in", "operation", "capture")
OWN = dict.fromkeys(OF_OVERFLOW, "OVERFLOW") | {"stage": "PREFLIGHT", "missing": "UNKNOWN"}
"""field -> the only kind that has it"""
PLACES = {"place_of": "OVERFLOW", "place_in_collective": "OVERFLOW"}
"""function -> the only kind that has the fields that it returns"""


def is_verdict(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Verdict"


def wrong_fields(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in filter(is_verdict, nodes):
        given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "kind")]
        kind = ast.unparse(given[0]).removeprefix("VerdictKind.")  # a variable is no kind that has its own fields
        for keyword in node.keywords:
            if keyword.arg is not None:
                owner = OWN.get(keyword.arg, kind)
            else:
                called = {call.id for call in ast.walk(keyword.value) if isinstance(call, ast.Name)}
                owner = next((PLACES[name] for name in sorted(called) if name in PLACES), kind)
            if owner != kind:
                yield f"{kind} in line {node.lineno}: {keyword.arg or ast.unparse(keyword.value)} is of {owner}"


def test_no_rule_sets_a_field_of_another_kind():
    files = [*(ROOT / "collector").rglob("*.py")]
    assert {path.name: wrong for path in files if (wrong := [*wrong_fields(nodes_of(path))])} == {}
    assert sum(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "Verdict" for p in files for node in nodes_of(p)
    )


def test_a_wrong_field_is_found():
    source = """
Verdict(VerdictKind.HANG, "", sure, rank=1, value="nan")
Verdict(kind, "", sure, **whose(facts, rank), **(place_of(first) | {}))
Verdict(VerdictKind.OVERFLOW, "", sure, **place_of(first), between=None)
"""
    assert [*wrong_fields(ast.walk(ast.parse(source)))] == [
        "HANG in line 2: value is of OVERFLOW",
        "kind in line 3: place_of(first) | {} is of OVERFLOW",
    ]


def test_the_fields_are_those_of_report_json():
    assert OWN.keys() <= set(Verdict.__struct_fields__)
