"""What users turn on in a framework: it trains the same bits watched, and the first rank and module are named."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ..ports import ports_of_this_test

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from rows import OVERFLOW, PYTHON, ROWS, TORCHRUN, Row, bad_of, run_plainly, run_to_overflow, run_watched

SETTINGS = [
    Row(
        name,
        package,
        "",
        launcher,
        script,
        ("--how", how),
        module="net.block.widen",
    )
    for name, package, launcher, script, how in (
        ("Trainer, --debug underflow_overflow", "accelerate", TORCHRUN, "with_trainer.py", "debug"),
        ("Trainer, auto_find_batch_size", "accelerate", TORCHRUN, "with_trainer.py", "find_batch_size"),
        ("Lightning, manual optimization", "lightning", (PYTHON,), "with_lightning.py", "manual"),
    )
]
each_setting = pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)


@pytest.fixture
def port(row: Row):
    if not row.is_installed:
        pytest.skip(f"{row.package} is not installed")
    with ports_of_this_test((number,) for number in range(24000, 25000)) as (number,):
        yield number


@pytest.mark.soak
@each_setting
def test_it_trains_the_same_bits_and_is_clean(row: Row, tmp_path: Path, port: int):
    plain = run_plainly(row, 2, tmp_path, port)
    watched, clean = run_watched(row, 2, tmp_path, port)

    assert plain.code == watched.code == 0, watched.text
    assert len(plain.losses) == 8
    assert watched.losses == plain.losses, "bit for bit"
    assert (clean["kind"], clean["certainty"]) == ("clean", "established")


@pytest.mark.slow
@pytest.mark.sample(1, turns=True)
@each_setting
def test_the_first_rank_and_module_are_named(row: Row, tmp_path: Path, port: int):
    overflowed, found = run_to_overflow(row, 2, tmp_path, port)

    assert overflowed.code == OVERFLOW, overflowed.text
    assert (found["kind"], found["rank"], found["module"]) == ("overflow", bad_of(2), row.module)
    assert overflowed.text.count("gpuwatch report: run") == 1


ZERO_2 = next(row for row in ROWS if row.name == "DeepSpeed, ZeRO 2")


@pytest.mark.soak
@pytest.mark.parametrize("row", [replace(ZERO_2, arguments=("--how", "2,inf"))], ids=[ZERO_2.name])
def test_a_step_on_a_partition_that_nobody_sees_names_no_rank(row: Row, tmp_path: Path, port: int):
    overflowed, found = run_watched(row, 2, tmp_path, port)

    assert overflowed.code == OVERFLOW, overflowed.text
    assert (found["kind"], found["certainty"], found["rank"]) == ("overflow", "unknown", None)
    assert "so the first rank is unknown" in found["statement"]
