from __future__ import annotations

import pytest
from gpuwatch.core.plain import MOST, plain, plain_fields, plain_lines
from gpuwatch.core.records import Anomaly, Where
from hypothesis import given
from hypothesis import strategies as st


@given(st.text(st.characters(exclude_categories=[]), max_size=600))
def test_a_name_is_one_line_that_a_terminal_only_shows(text):
    shown = plain(text)
    assert len(shown.splitlines()) <= 1
    assert len(shown) <= MOST
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)
    shown.encode()


@given(st.text(max_size=600))
def test_text_keeps_its_lines_and_nothing_else_that_controls(text):
    assert not any(ord(c) < 32 and c not in "\n\t" for c in plain_lines(text))
    plain_lines(text).encode()


@pytest.mark.parametrize("name", ["", "layer.0.fc", "größer", "モジュール", "a b", "[red]x[/red]", "C:\\temp"])
def test_an_ordinary_name_stays_as_it_is(name):
    assert plain(name) == plain_lines(name) == name


def test_records_are_made_safe_inside_out_and_stay_the_same_if_they_are():
    evil = "x\x1b[2J\nVERDICT  clean"
    anomaly = Anomaly(Where(0, root=evil), 0, evil, evil, "forward", evil, "nan", "float32", cause="two\nlines\x9b")
    safe = plain_fields(anomaly)
    assert safe.module == safe.cls == safe.role == safe.where.root == "x\\x1b[2J\\nVERDICT  clean"
    assert safe.cause == "two\nlines\\x9b"
    assert plain_fields(safe) is safe
