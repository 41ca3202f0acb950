"""The real packages, on the CPU: the same bits and exit codes as without gpuwatch, and the right rank and module."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..ports import ports_of_this_test

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from rows import OVERFLOW, ROWS, Row, run_plainly, run_to_overflow, run_watched

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def _param(row: Row):
    """Ray itself gives up where starting it takes longer than 30 s, and nothing changes that."""
    marks = [pytest.mark.soak] if row.package == "ray" else []
    return pytest.param(row, marks=marks, id=f"{row.name}, {row.shown}")


each_row = pytest.mark.parametrize("row", [_param(row) for row in ROWS])


@pytest.fixture
def port(row: Row) -> Iterator[int]:
    if not row.is_installed:
        pytest.skip(f"{row.package} is not installed")
    with ports_of_this_test((number,) for number in range(24000, 25000)) as (number,):
        yield number


@pytest.mark.slow
@pytest.mark.sample(3)
@each_row
def test_it_trains_the_same_bits_and_is_clean(row: Row, tmp_path: Path, port: int):
    plain = run_plainly(row, tmp_path, port)
    watched, clean = run_watched(row, tmp_path, port)

    assert plain.code == watched.code == 0, watched.text
    assert len(plain.losses) == 4 * row.ranks
    assert watched.losses == plain.losses, "bit for bit"
    assert (clean["kind"], clean["certainty"]) == ("clean", "established")


@pytest.mark.slow
@each_row
def test_the_first_rank_and_module_are_named(row: Row, tmp_path: Path, port: int):
    overflowed, found = run_to_overflow(row, tmp_path, port)

    assert overflowed.code == OVERFLOW, overflowed.text
    assert (found["kind"], found["rank"], found["module"]) == ("overflow", row.bad, row.module)
    assert found["phase"] == "forward"
    assert row.value in ("", found["value"])


def test_the_page_tells_of_each_row_what_the_tests_ask_of_it():
    first_table = PAGE.read_text().partition("## Scripts")[0]
    told = [line.split("|")[1:-1] for line in first_table.splitlines() if line.startswith("| ")]
    tried = {(name.strip(), shown.strip("` ")): [cell.strip() for cell in cells] for name, shown, *cells in told[1:]}
    asked = {(row.name, row.shown): ["yes", "yes", "yes", f"`{row.module}`"] for row in ROWS}
    assert tried == asked
