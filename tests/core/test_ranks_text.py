import re

import pytest
from gpuwatch.core.text import ranks_text
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2, 3, 7], "ranks 0-3, 7"),
        ([5, 5, 6, 7], "ranks 5-7"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
        ([*range(9), *range(20, 29), *range(40, 60)], "ranks 0-8, 20-28, 40-59"),
    ],
)
def test_in_words(ranks, text):
    assert ranks_text(ranks) == text


@given(st.sets(st.integers(0, 200), min_size=2))
def test_the_words_name_these_ranks_and_no_other(ranks):
    named = set()
    for piece in re.findall(r"\d+(?:-\d+)?", ranks_text(ranks, most=1000)):
        first, _, last = piece.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks


@given(st.sets(st.integers(0, 10_000), min_size=2))
def test_it_stays_short(ranks):
    text = ranks_text(ranks)
    assert len(text) < 130
    shown, _, rest = text.partition(" and ")
    counted = sum(int(last or first) - int(first) + 1 for first, last in re.findall(r"(\d+)(?:-(\d+))?", shown))
    assert counted + (int(rest.split()[0]) if rest else 0) == len(ranks)
