"""What README.md and docs/ show is what the commands print: walk.py does what their reader does."""

from __future__ import annotations

import pytest

from .walk import PAGES, ROOT, Walk, blocks, masked, name_of, place, renewed, stands_in, why_not
from .walk_table import BEFORE, NOT_RUN

WALKED = [
    page
    for page in PAGES
    if any(not why_not(page, text) for block in blocks(page) for part in block.parts() for text in part)
]


@pytest.mark.slow
@pytest.mark.timeout(7200)  # some pages have a dozen jobs
@pytest.mark.sample(1, turns=True)
@pytest.mark.parametrize("page", WALKED, ids=name_of)
def test_a_page_shows_what_its_commands_print(page):
    with place(page) as folder:
        walk = Walk(page, folder)
        walk.walk()
    assert walk.trouble == [], "\n\n".join(walk.trouble)


def test_the_table_has_no_line_too_many():
    used = {why_not(page, text) for page in PAGES for block in blocks(page) for part in block.parts() for text in part}
    assert [line for line in NOT_RUN if line not in used] == []
    assert set(BEFORE) <= set(map(name_of, WALKED))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_shows_has_a_command_that_prints_it(page):
    parts = [block.parts() for block in blocks(page)]
    run = [text for commands, _ in parts for text in commands if not why_not(page, text)]
    shown = [text for _, texts in parts for text in texts if not why_not(page, text)]
    assert not shown or run or name_of(page) in BEFORE, (
        f"a job for BEFORE or a line of NOT_RUN (walk_table.py): {shown}"
    )


def test_every_kind_has_a_page_with_an_example():
    for page in (ROOT / "docs" / "verdicts").glob("*.md"):
        shown = [text for block in blocks(page) for text in block.parts()[1]]
        assert page.stem == "index" or any(text.startswith(f"VERDICT  {page.stem}") for text in shown), page


PRINTED = """gpuwatch: run 20261126-031000-77aa
VERDICT  overflow, established
Rank 0 on vm overflowed first: +inf in the output of `fc` (Linear), batch 31,
after 0.8 s, /tmp/x1/f.py:17.

done
"""


@pytest.mark.parametrize(
    ("shown", "right"),
    [
        (
            "Rank 1 on vm overflowed first: +inf in the\noutput of `fc` (Linear), batch 68, after 2 ms, f.py:8.",
            True,
        ),
        ("run 20251122-035038-0ee6", True),
        ("VERDICT  overflow, ... batch 68, ...", True),
        ("VERDICT  overflow, supported", False),
        ("Rank 1 on vm overflowed first: +inf in the output of `wo` (Linear)", False),
        ("Rank 1 on vm overflowed first: nan in the output", False),
        ("batch 68, ... VERDICT", False),
        ("/home/me/test.py:17", False),
    ],
)
def test_only_what_differs_from_run_to_run_may_differ(shown, right):
    assert stands_in(shown, masked(PRINTED)) is right


def test_a_paragraph_is_renewed_by_its_first_word():
    assert renewed("done at last", ["started", "done now"]) == "done now"
    assert renewed("run 1: a\n...", ["run 2: b\nc\nd"]) == "run 2: b\n..."
    assert renewed("run 1: ... end", ["run 2: b"]) == "run 1: ... end"
    assert renewed("gone", ["run 2: b"]) == "gone"
    assert renewed("VERDICT  a", ["── run ──\nVERDICT  b\nWhy\n\nranks"]) == "VERDICT  b\nWhy"
