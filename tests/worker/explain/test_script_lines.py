"""The line that assigned a variable is told only if the statement that reads it cannot have read another value."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpuwatch.worker.explain.script_lines import FunctionSource, source_of_code

GROWS = """
losses = [a / 2]
losses.append(b / n)
use(losses)
"""
BEGINS_A_LOOP = """
x = a / 2
while use(x):
    x = b / n
"""
OF_A_LOOP = """
x = a / 2
for y in use(x):
    x = b / n
"""
BESIDE = """
x = a / 2
x = b / n; use(x)
"""
WITHIN = """
x = a / 2
use([x for x in b])
"""
OF_A_MODULE = """
def change():
    global x
    x = b / n
x = a / 2
change()
use(x)
"""
CAPTURED = """
x = a / 2
match b:
    case {"x": 1, **x}:
        use(x)
"""


def source(tmp_path: Path, text: str) -> FunctionSource:
    path = tmp_path / "script.py"
    path.write_text(text)
    found = source_of_code(compile(text, str(path), "exec"))
    assert found is not None
    return found


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize("text", [GROWS, BEGINS_A_LOOP, OF_A_LOOP, BESIDE, WITHIN, OF_A_MODULE, CAPTURED])
def test_no_line_is_told_where_another_value_may_have_been_read(tmp_path: Path, text: str):
    name = "losses" if "losses" in text else "x"
    found = source(tmp_path, text)
    assert found.assigned(name, line_of(text, "use(")).line == 0
    assert found.value_of(name, line_of(text, "use(")) is None


@pytest.mark.parametrize(
    "use",
    ["use(x)", "x = use(x)", "x += use(x)", "for y in use(x):\n    pass", "while use(x):\n    y = 1", "use(x); y = 1"],
)
def test_a_line_is_told_where_no_other_one_can_have_been_read(tmp_path: Path, use: str):
    text = f"x = a / 2\n{use}\n"
    assert source(tmp_path, text).assigned("x", line_of(text, "use(")).line == 1


def test_in_a_case_the_line_of_that_case_is_told(tmp_path: Path):
    text = "x = a\nmatch a:\n    case 1:\n        x = b\n        use(x)\n    case 2:\n        x = c\n"
    assert source(tmp_path, text).assigned("x", 5).line == 4
