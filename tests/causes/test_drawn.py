"""The cause that is named, against trainings that a seed draws. All of them: `gpuwatch.tests.causes.benchmark`."""

from __future__ import annotations

import random

import pytest

from .benchmark import held, outcome_of
from .drawn import FAMILIES, Case, drawn


def test_there_are_a_hundred_and_fifty():
    assert sum(FAMILIES.values()) == len(drawn(0)) == 150


@pytest.mark.quick(6)
@pytest.mark.sample(14)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "late"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_no_cause_is_wrong(family, on_device, request):
    """Two of each family, other ones for each --turn. What is less than right is counted by the benchmark alone."""
    draw = random.Random(f"{request.config.getoption('turn')} {family.__name__}")
    for known in (family(Case(draw)) for _ in range(2)):
        with held(on_device):
            outcome, said = outcome_of(known)
        assert outcome in ("right", "less"), (known.name, known.kinds, outcome, said)
