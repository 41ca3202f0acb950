"""Frameworks as their users run them, over NCCL: the losses are as without gpuwatch, and a fault is placed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ...ports import ports_of_this_test

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from framework_rows import BAD_RANK, OVERFLOW, ROWS, SIZE, CudaRow, run_plainly, run_to_overflow, run_watched

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"


each_row = pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.soak, id=row.name) for row in ROWS])


@pytest.fixture
def port(row: CudaRow) -> Iterator[int]:
    if not row.is_installed:
        pytest.skip(f"{row.package} is not installed")
    with ports_of_this_test((number,) for number in range(24000, 25000)) as (number,):
        yield number


@each_row
def test_a_healthy_run_has_the_same_losses(row: CudaRow, tmp_path: Path, port: int):
    plain = run_plainly(row, SIZE, tmp_path, port)
    watched, verdict = run_watched(row, SIZE, tmp_path, port)

    assert plain.code == watched.code == 0, watched.text
    assert watched.losses == plain.losses != [], "bit for bit"
    assert (verdict["kind"], verdict["certainty"]) == ("clean", row.certainty)


@each_row
def test_an_overflow_of_one_rank_is_named(row: CudaRow, tmp_path: Path, port: int):
    outcome, found = run_to_overflow(row, SIZE, tmp_path, port)

    assert outcome.code == OVERFLOW, outcome.text
    assert (found["kind"], found["rank"], found["module"]) == ("overflow", BAD_RANK, row.module)
    assert row.value in ("", found["value"])
    assert row.is_operation(found["operation"])


def test_the_page_has_each_row():
    told = PAGE.read_text().partition("## On a device's path")[2].partition("## ")[0]
    for row in ROWS:
        assert f"| {row.name} | `{row.shown}` | yes | clean, {row.certainty} | `{row.module}`" in told
