"""A run of weeks must not pay for what it has seen."""

import pytest


@pytest.mark.slow
def test_ten_thousand_batches_grow_nothing(bench):
    """Whether they get slower: benchmarks/many_batches.py."""
    run = bench.launch("many_batches.py", "--preflight", "off", nproc=1)

    assert run.code == 0
    word, grown, *_ = run.stdout.split()
    assert word == "grown"
    assert int(grown) < 2 << 20, "memory of the worker"
    assert run.report["ranks"][0]["faults"] == []
    assert run.report["ranks"][0]["batch"] == 9_999
