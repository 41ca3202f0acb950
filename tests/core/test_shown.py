"""What a script calls its modules is shown on one line, without control characters."""

from __future__ import annotations

import pytest
from gpuwatch.core.text import MOST_OF_A_NAME, is_shown, shown, shown_lines, shown_name
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("encoder.layers.0", "encoder.layers.0"),
        ("größe 数", "größe 数"),
        ("a\nb\r\n", "a\\nb\\r\\n"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("a\u2028b\x85c", "a\\u2028b\\x85c"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_is_not_printable_is_escaped(text, line):
    assert shown(text) == line


@given(st.text(st.characters()))
def test_any_text_is_one_printable_line_and_stays_as_it_is(text):
    line = shown(text)
    assert line.isprintable()
    assert len(line.splitlines()) <= 1
    assert shown(line) == line
    name = shown_name(text)
    assert len(name) <= MOST_OF_A_NAME
    assert shown_name(name) == name
    assert is_shown(text) == (name == text)


def test_a_long_name_keeps_both_of_its_ends():
    name = shown_name("model." + "x" * 500 + ".fc2")
    assert len(name) == MOST_OF_A_NAME
    assert name.startswith("model.x")
    assert name.endswith("x.fc2")


def test_a_traceback_keeps_its_lines():
    assert shown_lines("Traceback:\n  \x1b[1mboom\r\n") == "Traceback:\n  \\x1b[1mboom\\r\n"
