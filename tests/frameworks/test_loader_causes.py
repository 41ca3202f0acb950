"""The cause and the samples where a framework hands the batches to the model: accelerate, Lightning and Trainer."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest

from ..causes.benchmark import outcome_of_loaded
from ..causes.framework_loaders import FRAMEWORKS
from ..causes.handed_samples import Draw
from ..ports import ports_of_this_test

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

from rows import OVERFLOW, TORCHRUN, Row, run_to_overflow

FAMILIES = [(package, family) for package, families in FRAMEWORKS.items() for family in families]
SHARED = [
    Row(f"{name} on two ranks", package, "", TORCHRUN, "with_loader.py", ("--how", package))
    for name, package in (("accelerate", "accelerate"), ("Lightning", "lightning"), ("Trainer", "transformers"))
]


@pytest.mark.slow
@pytest.mark.sample(6, turns=True)
@pytest.mark.parametrize(("package", "family"), FAMILIES, ids=[family.__name__ for _, family in FAMILIES])
def test_the_cause_and_the_samples_are_right(package, family):
    for needed in {package, "accelerate"} if package == "transformers" else {package}:
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    known = family(Draw(random.Random(family.__name__)))
    outcome, said = outcome_of_loaded(known)
    assert outcome == "right", (known.name, said)


@pytest.mark.slow
@pytest.mark.sample(1, turns=True)
@pytest.mark.parametrize("row", SHARED, ids=lambda row: row.name)
def test_the_rank_and_its_sample_are_named(row: Row, tmp_path: Path):
    for needed in (row.package, "accelerate"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    with ports_of_this_test((number,) for number in range(24000, 25000)) as (port,):
        overflowed, found = run_to_overflow(row, 2, tmp_path, port)

    assert overflowed.code == OVERFLOW, overflowed.text
    said = [re.fullmatch(r"rank (\d) handed (.*)", line) for line in overflowed.losses]
    handed = [(int(line[1]), json.loads(line[2])) for line in said if line is not None]
    ((rank, indices),) = [each for each in handed if 21 in each[1]]
    assert (found["kind"], found["rank"], found["cause"]["kind"]) == ("overflow", rank, "data")
    (told,) = [each for line in found["evidence"] for each in re.findall(r"\(index ([\d, ]+)\)$", line)]
    assert [int(index) for index in told.split(", ")] == indices
    assert "(index 21 of data set `" in found["cause"]["statement"]
    assert "(index 21 of data set `" in found["next"][0]
