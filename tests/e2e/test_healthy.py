"""Sixty healthy trainings that make a non-finite value and never train with it: none is ended or warned of."""

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="host"),
        pytest.param({"GPUWATCH_LATE_DEVICE": "7"}, id="late", marks=pytest.mark.soak),
    ],
)
def test_a_value_that_leads_nowhere_ends_nothing(bench, environment):
    run = bench.launch("healthy.py", "--preflight", "off", "--standalone", nproc=1, **environment)

    assert run.stdout.count(" trained\n") == 60
    assert (run.code, run.verdict["kind"]) == (0, "clean"), run.verdict["statement"]
    assert run.report["ranks"][0].get("warnings", []) == []
    assert run.report["ranks"][0]["faults"] == []
