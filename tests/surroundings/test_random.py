"""Launches in random surroundings: see random_runs.py, which prints a line for each seed."""

from __future__ import annotations

import pytest

from ..forks import LAUNCH, Forks
from .random_runs import run_seed

SEEDS = 200
IN_A_TEST = 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, SEEDS, IN_A_TEST))
@pytest.mark.sample(1, of="random surroundings", turns=True)
def test_no_harm_no_leftover_and_nothing_false(first, tmp_path, request):
    """In a sample: 4 of the ten seeds."""
    seeds = range(first, first + (4 if request.config.getoption("sample") else IN_A_TEST))
    with Forks(*LAUNCH) as forks:
        assert [text for seed in seeds for text in run_seed(seed, forks, tmp_path / "jobs")] == []
