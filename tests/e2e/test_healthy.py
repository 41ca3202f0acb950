"""Healthy trainings: a non-finite value that leads nowhere ends none and none is warned of; none keeps more memory."""

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


@pytest.mark.parametrize(
    "environment",
    [pytest.param({}, id="host"), pytest.param({"GPUWATCH_LATE_DEVICE": "7"}, id="late", marks=pytest.mark.slow)],
)
def test_no_tensor_waits_for_a_garbage_collection(bench, environment):
    run = bench.launch("garbage.py", "--preflight", "off", "--standalone", nproc=1, **environment)

    found = [line.rpartition(": ")[2] for line in run.stdout.splitlines() if line.endswith(" tensors and frames")]
    assert found == ["0 tensors and frames"] * 10, run.stdout
    assert (run.code, run.verdict["kind"]) == (0, "clean")
