"""A run of weeks must not pay for what it has seen."""

import pytest


@pytest.mark.slow
@pytest.mark.alone
def test_ten_thousand_batches_grow_nothing_and_slow_nothing_down(bench):
    run = bench.launch("many_batches.py", "--preflight", "off", nproc=1)

    assert run.code == 0
    words = run.stdout.split()
    grown, slower = int(words[1]), float(words[3])
    assert grown < 2 << 20, "memory of the worker"
    assert slower < 1.3, "median of the last 1,000 batches against batches 1,000 to 2,000"
    assert run.report["ranks"][0]["faults"] == []
    assert run.report["ranks"][0]["batch"] == 9_999
