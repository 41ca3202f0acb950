"""A run of weeks must not pay for what it has seen."""

import pytest


@pytest.mark.parametrize(
    "batches", [pytest.param(2_500, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)]
)
def test_many_batches_grow_nothing(bench, batches):
    run = bench.launch("many_batches.py", "--preflight", "off", nproc=1, args=(str(batches),))

    assert run.code == 0
    word, grown = run.stdout.split()
    assert word == "grown"
    assert int(grown) < 2 << 20, "memory of the worker"
    assert run.report["ranks"][0]["faults"] == []
    assert run.report["ranks"][0]["batch"] == batches - 1
