"""The real packages, on the CPU: the same bits and exit codes as without gpuwatch, and the right rank and module."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..ports import ports_of_this_test

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from rows import HEAD, OVERFLOW, ROWS, SIZES, Row, bad_of, report, run_plainly, run_to_overflow, run_watched

STARTERS = ("accelerate", "Lightning, ddp", "DeepSpeed, ZeRO 2")
PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def name_of(row: Row) -> str:
    return f"{row.name}, {row.shown}"


# A Ray on two slow cores took eleven minutes of a run of CI: it takes turns with DeepSpeed's.
SLOWEST = ("deepspeed", "ray")
in_turn = pytest.mark.sample(1, of="DeepSpeed and Ray", turns=True)
each_row = pytest.mark.parametrize("row", ROWS, ids=name_of)
each_launcher = pytest.mark.parametrize(
    "row", [pytest.param(row, marks=in_turn if row.package in SLOWEST else (), id=name_of(row)) for row in ROWS]
)


@pytest.fixture
def port(row: Row) -> Iterator[int]:
    if not row.is_installed:
        pytest.skip(f"{row.package} is not installed")
    with ports_of_this_test((number,) for number in range(24000, 25000)) as (number,):
        yield number


@pytest.mark.slow
@pytest.mark.sample(1, turns=True)
@each_row
def test_it_trains_the_same_bits_and_is_clean(row: Row, tmp_path: Path, port: int):
    trains_the_same_bits(row, tmp_path, port)


def trains_the_same_bits(row: Row, folder: Path, port: int, *options: str) -> str:
    """Returns what the watched one has written on stderr."""
    ranks = row.sizes[0]
    plain = run_plainly(row, ranks, folder, port)
    watched, clean = run_watched(row, ranks, folder, port, *options)

    assert plain.code == watched.code == 0, watched.text
    assert len(plain.losses) == 4 * ranks
    assert watched.losses == plain.losses, "bit for bit"
    assert (clean["kind"], clean["certainty"]) == ("clean", "established")
    return watched.text


@pytest.mark.slow
@each_launcher
def test_the_first_rank_and_module_are_named(row: Row, tmp_path: Path, port: int):
    the_first_is_named(row, row.sizes[0], tmp_path, port)


@pytest.mark.slow
@pytest.mark.sample(1, turns=True)
@pytest.mark.parametrize("row", [row for row in ROWS if 4 in row.sizes[1:]], ids=name_of)
def test_the_first_of_four_ranks_is_named(row: Row, tmp_path: Path, port: int):
    the_first_is_named(row, 4, tmp_path, port)


def the_first_is_named(row: Row, ranks: int, folder: Path, port: int):
    overflowed, found = run_to_overflow(row, ranks, folder, port)

    assert overflowed.code == OVERFLOW, overflowed.text
    assert (found["kind"], found["rank"], found["module"]) == ("overflow", bad_of(ranks), row.module)
    assert found["phase"] == row.phase(ranks)
    assert row.value in ("", found["value"])


@pytest.mark.slow
@pytest.mark.sample(1, turns=True)
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.name in STARTERS], ids=lambda row: f"{row.name}, {row.shown}"
)
def test_a_preflight_finds_the_ranks_that_a_framework_starts(row: Row, tmp_path: Path, port: int):
    """And the training after it has the same bits as without gpuwatch."""
    options = ("--preflight", "quick", "--preflight-timeout", "600")  # for a rank that starts long after the other
    said = trains_the_same_bits(row, tmp_path, port, *options)

    for rank in report(tmp_path, "clean")["ranks"]:
        assert [(stage["stage"], stage["grade"]) for stage in rank["preflight"]["stages"]][-1] == ("node group", "ok")
    assert "preflight ok: 2 ranks on 1 node" in said


def test_the_page_tells_of_each_row_what_the_tests_ask_of_it():
    first_table = PAGE.read_text().partition("## Scripts")[0]
    lines = [line.split("|")[1:-1] for line in first_table.splitlines() if line.startswith("| ")]
    told = [[cell.strip() for cell in cells] for cells in lines]
    assert tuple(told[0]) == HEAD
    asked = [
        [
            row.name,
            f"`{row.shown}`",
            "yes",
            "yes",
            *("yes" if size in row.sizes else "-" for size in SIZES),
            f"`{row.module}`",
        ]
        for row in ROWS
    ]
    assert [cells[:-2] for cells in told[1:]] == asked
    assert all(re.fullmatch(r"\d+\.\d, \d+\.\d", cell) for cells in told[1:] for cell in cells[-2:])
