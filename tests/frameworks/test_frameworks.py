"""The real packages, on the CPU: the same bits and exit codes as without gpuwatch, and the right rank and module."""

import sys
from pathlib import Path

import pytest

from ..ports import ports_of_this_test

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from rows import OVERFLOW, ROWS, Row, try_row

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}, {row.shown}")
def test_a_framework(row: Row, tmp_path: Path):
    if not row.is_installed:
        pytest.skip(f"{row.package} is not installed")
    with ports_of_this_test((number,) for number in range(24000, 25000)) as (port,):
        trial = try_row(row, tmp_path, port)

    assert trial.plain.code == trial.watched.code == 0, trial.watched.text
    assert len(trial.plain.losses) == 4 * row.ranks
    assert trial.watched.losses == trial.plain.losses, "bit for bit"
    assert trial.clean["kind"] == "clean"
    assert trial.clean["certainty"] == "established" or (row.kills and trial.clean["certainty"] == "supported")
    assert trial.overflowed.code == OVERFLOW, trial.overflowed.text
    found = trial.overflow
    assert (found["kind"], found["rank"], found["module"]) == ("overflow", row.bad, row.module)
    assert found["phase"] == "forward"
    assert row.value in ("", found["value"])


def test_the_page_tells_of_each_row_what_the_tests_ask_of_it():
    first_table = PAGE.read_text().partition("## Scripts")[0]
    told = [line.split("|")[1:-1] for line in first_table.splitlines() if line.startswith("| ")]
    tried = {(name.strip(), shown.strip("` ")): [cell.strip() for cell in cells] for name, shown, *cells in told[1:]}
    asked = {(row.name, row.shown): ["yes", "yes", "yes", f"`{row.module}`"] for row in ROWS}
    assert tried == asked
