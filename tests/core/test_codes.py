"""Codes: the published ones stay, each has a text, and each message has a code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from gpuwatch.core.codes import Code, code_texts
from gpuwatch.core.preflight import PreflightFinding
from gpuwatch.core.verdicts import VerdictKind
from msgspec.structs import fields

from .test_imports import ROOT
from .test_names import all_modules

PUBLISHED = """
GW101 clean
GW102 crash
GW103 preflight
"""


def calls(*names: str) -> Iterator[tuple[str, ast.Call]]:
    """Those of the package, by the last part of the called name, with the file and the line."""
    for path in all_modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called in names:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_a_published_code_never_changes():
    """Add a new code at the end of its block here, too; a line of this list is never changed or removed."""
    assert [f"{code} {code.kind}" for code in Code] == PUBLISHED.split("\n")[1:-1]


def test_each_code_has_one_text_in_plain_sentences():
    texts = code_texts()
    assert list(texts) == list(Code)
    for code, (title, text) in texts.items():
        assert re.fullmatch(r"[A-Z-][^.]+\.?[^.]*\.", title), code
        assert 2 <= len(re.findall(r"[.:?](?= |$)", text)) and len(text) < 800, code
    assert len({title for title, _ in texts.values()}) == len(texts)


def test_each_code_is_given_somewhere():
    used = {
        node.attr
        for path in all_modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Code"
    }
    assert {code.name for code in Code} - used == set()


def test_each_kind_of_verdict_has_the_code_of_its_name():
    assert [kind.code.kind for kind in VerdictKind] == [str(kind) for kind in VerdictKind]


def test_each_finding_of_the_preflight_has_a_code():
    assert fields(PreflightFinding)[-1].name == "code"
    made = list(calls("PreflightFinding"))
    assert len(made) > 10
    assert [place for place, call in made if "code" not in {word.arg for word in call.keywords}] == []


STATUS = ()


def test_each_line_for_the_user_that_tells_of_trouble_has_a_code():
    """What is said on stderr while a job runs. STATUS has how those lines begin that tell of no trouble."""
    without = []
    for place, call in calls("say", "_say", "tell", "_tell", "UserNotice"):
        literals = [node for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        first = next((node.value for node in literals if node.value.strip() not in ("", "gpuwatch:")), "")
        names = {getattr(node, "id", "") for node in ast.walk(call)}
        if first and not first.startswith(STATUS) and not names & {"Code", "coded"}:
            without.append(f"{place}: {first}")
    assert without == []
