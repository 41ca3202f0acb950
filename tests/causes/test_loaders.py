"""The cause that is named and the samples that are told, where torch's DataLoader hands out the batches."""

from __future__ import annotations

import random

import pytest

from .benchmark import outcome_of_loaded
from .handed_samples import Draw
from .loaders import LOADERS


@pytest.mark.quick(3)
@pytest.mark.sample(8)
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("family", LOADERS, ids=lambda family: family.__name__)
def test_the_cause_and_the_samples_are_right(family, number):
    known = family(Draw(random.Random(f"{family.__name__} {number}")))
    outcome, said = outcome_of_loaded(known)
    assert outcome == "right", (known.name, said)
