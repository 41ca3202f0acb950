"""The part of a line that is the operation, as real operations of real forwards have it.

A forward makes a bad value on the line that it is named after. Lines are as long as those that people write.
"""

from __future__ import annotations

import linecache
import sys
from types import SimpleNamespace

import gpuwatch
import pytest
import torch
from gpuwatch.worker.explain import code_place
from gpuwatch.worker.explain.code_place import place_of
from torch import nn

# fmt: off
# ruff: noqa: E501, E702  # lines as scripts have them


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.q, self.k = nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.constant_(self.q.bias, 1e30)
        nn.init.constant_(self.k.bias, 1e30)


class LongLine(Attention):
    def forward(s, x):
        h = s.n(x); y = {"one": h, "another": x}["one"]; a = s.q(h) @ s.k(y).transpose(-2, -1) * 0.5; a = a.masked_fill(a < 0, -1e9); return a.softmax(-1) @ h


class NonAscii(Attention):
    def forward(s, x):
        größe = {"größe": s.n(x), "数量": x, "🙂": x}["größe"]; s.größe, a = größe, s.q(größe) @ s.k(größe).mT; return a.sum(0)  # ñ


class TwoLines(Attention):
    def forward(s, x):
        h = s.n(x); y = torch.zeros(4, 4).add(1).mul(2).sub(1); return y + (s.q(h) @ s.k(h)  # a comment
                                                                            .transpose(-2, -1))


class TwoLinesOfCall(Attention):
    def forward(s, x):
        h = s.q(x); return torch.mul(
            h, s.k(x)
        )


class InModule(Attention):
    def forward(s, x):
        s.q.weight.data.fill_(3e38); h = s.n(x) + 1; h = h * 1.0; return s.k(s.q(h * 10))

# fmt: on


def operation_of(model):
    found = gpuwatch.explain(model, torch.ones(4, 4)).operation
    assert found is not None
    return found


needs_columns = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no columns")


@needs_columns
@pytest.mark.parametrize(
    ("model", "part"),
    [
        (LongLine, "s.q(h) @ s.k(y).transpose(-2, -1)"),
        (NonAscii, "s.q(größe) @ s.k(größe).mT"),
        (TwoLines, "s.q(h) @ s.k(h)  # a comment"),
        (TwoLinesOfCall, "torch.mul("),
        (InModule, "s.q(h * 10)"),
    ],
)
def test_the_columns_are_those_of_the_operation(model, part):
    found = operation_of(model())
    assert found.columns is not None
    assert found.code[slice(*found.columns)] == part


@needs_columns
def test_a_long_line_has_its_operation_in_the_middle():
    """As the test above takes it: else a cut would show the operation by chance."""
    found = operation_of(LongLine())
    assert len(found.code) > 120
    assert 40 < found.columns[0] < found.columns[1] < len(found.code) - 40


@needs_columns
def test_the_headroom_of_each_operation_has_its_columns():
    seen = gpuwatch.explain(LongLine(), torch.ones(4, 4)).operations
    parts = [each.place.code[slice(*each.place.columns)] for each in seen]
    assert parts[:3] == ["s.q(h)", "s.k(y)", "s.q(h) @ s.k(y).transpose(-2, -1)"]


def frame_at(first_line, last_line, first, end, *, line=7, units=5):
    """A frame that runs its fifth unit."""
    unknown = [(1, 1, 0, 0)] * (units - 1)
    code = SimpleNamespace(
        co_filename="x.py", co_positions=lambda: iter([*unknown, (first_line, last_line, first, end)])
    )
    return SimpleNamespace(f_code=code, f_lineno=line, f_lasti=2 * (units - 1))


@pytest.fixture
def source(monkeypatch):
    """Sets the line of x.py."""
    return lambda text: monkeypatch.setattr(code_place, "getline", lambda file, line: text)


@pytest.mark.parametrize(
    ("at", "columns"),
    [
        ((7, 7, 8, 13), (4, 9)),
        ((7, 8, 8, 3), (4, 9)),
        ((7, 7, None, None), None),
        ((None, None, None, None), None),
        ((7, None, 8, 13), None),
        ((6, 7, 8, 13), None),
        ((7, 7, 8, 14), None),
        ((7, 7, 8, 8), None),
        ((7, 7, 9, 8), None),
        ((7, 7, 2, 13), None),
        ((7, 7, 1 << 40, 1 << 41), None),
    ],
)
def test_columns_that_do_not_fit_the_line_are_none(source, at, columns):
    """The file may have changed since it was compiled, and a compiler may know less."""
    source("    y = a + b\n")
    assert place_of("fc", frame_at(*at)) == ("fc", "x.py", 7, "y = a + b", columns)


def test_without_a_source_there_are_none(source):
    source("")
    assert place_of("fc", frame_at(7, 7, 8, 13)) == ("fc", "x.py", 7, "", None)


def test_a_code_that_ends_before_the_instruction_has_none(source):
    source("    y = a + b\n")
    frame = frame_at(7, 7, 8, 13)
    frame.f_lasti = 100
    assert place_of("fc", frame).columns is None


def test_before_python_3_11_there_are_none(source):
    source("    y = a + b\n")
    frame = frame_at(7, 7, 8, 13)
    del frame.f_code.co_positions
    assert place_of("fc", frame) == ("fc", "x.py", 7, "y = a + b", None)


@needs_columns
@pytest.mark.parametrize("indent", [" ", "\t", " \t"])
def test_a_cell_of_a_notebook_has_its_columns(monkeypatch, indent):
    """Its lines are in linecache alone. A tab is one character."""
    forward = f"{indent}def forward(self, x):\n{indent}{indent}é = 1; return x.abs().add(1e3).exp() * é\n"
    cell = f"class Grows(nn.Module):\n{forward}"
    lines = cell.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<ipython-input-9>", (len(cell), None, lines, "<ipython-input-9>"))
    names = {"nn": nn}
    exec(compile(cell, "<ipython-input-9>", "exec"), names)
    found = operation_of(names["Grows"]())
    assert found.code[slice(*found.columns)] == "x.abs().add(1e3).exp()"
