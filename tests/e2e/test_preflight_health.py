"""The driver's word on the GPUs, from a stand-in for its library, through the whole command.

The ranks compute on the CPU; CUDA_VISIBLE_DEVICES says by UUID which GPU each of them was given.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sample(2, of="the health of GPUs")]  # of those without a mark of their own
sample = pytest.mark.sample

NO_RETIREMENT = "* no_retirement error 3"


@pytest.fixture
def gpus(nvml):
    """One GPU of the stand-in for each of two ranks, both healthy."""
    nvml.says(NO_RETIREMENT)
    return {"CUDA_VISIBLE_DEVICES": ",".join(nvml.gpus)}


def health(run, grade: str) -> list[dict]:
    found = run.report["preflight"]["findings"]
    return [finding for finding in found if finding["stage"] == "health" and finding["grade"] == grade]


@sample(1, of="a GPU and its grade")
def test_healthy_gpus_are_watched_and_nothing_is_said_of_them(bench, nvml, gpus):
    run = bench.launch("ordinary.py", **gpus)
    assert run.code == 6  # the script calls no module
    assert [health(run, grade) for grade in ("warn", "fail", "unknown")] == [[], [], []]
    (node,) = run.report["nodes"]
    (watch,) = node["gpus"]
    assert (watch["grade"], watch["driver"], list(watch["devices"])) == ("ok", "580.95.05", list(nvml.gpus))
    assert node["xids"] == []
    for rank, uuid in enumerate(nvml.gpus):
        gpu = run.report["ranks"][rank]["gpu"]
        assert (gpu["device"], gpu["known"], gpu["changes"], gpu["xids"]) == (uuid, True, [], [])


@sample(1, of="what NVML does not tell")
def test_the_report_has_the_offset_of_the_nodes_clock(bench):
    run = bench.launch("ordinary.py", nproc=1)
    (node,) = run.report["nodes"]
    assert 0 < node["clock_round_trip_ns"] < 10**9
    assert abs(node["clock_offset_ns"]) <= node["clock_round_trip_ns"], "it is one and the same clock"


@sample(1)
def test_a_sick_gpu_stops_the_job_and_is_named(bench, nvml, gpus):
    nvml.says(NO_RETIREMENT, "1 remap_failed 1", "1 ecc_uncorrected_aggregate 3")
    run = bench.launch("ordinary.py", **gpus)
    assert run.code == 3
    verdict = run.verdict
    assert (verdict["kind"], verdict["rank"], verdict["stage"]) == ("preflight", 1, "health")
    assert f"{nvml.gpus[1]} on" in verdict["statement"]
    assert "a memory row could not be remapped" in verdict["statement"]
    (failed,) = health(run, "fail")
    assert (failed["ranks"], failed["device"]) == ([1], nvml.gpus[1])
    (warned,) = health(run, "warn")
    assert "in the GPU's life: 3" in warned["sentence"]
    assert run.report["ranks"][0]["state"] == "preflight failed", "it was not started either"


@sample(1, of="a GPU and its grade")
def test_a_warning_lets_the_training_run(bench, nvml, gpus):
    nvml.says(NO_RETIREMENT, "0 remap_pending 1")
    run = bench.launch("ordinary.py", **gpus)
    assert run.code == 6  # the script calls no module
    (warned,) = health(run, "warn")
    assert (warned["ranks"], warned["device"]) == ([0], nvml.gpus[0])


@sample(1, of="a GPU and its grade")
def test_the_users_thresholds_decide(bench, nvml, gpus):
    nvml.says(NO_RETIREMENT, "0 remap_pending 1")
    (bench.cwd / "limits.json").write_text('{"remap_pending": {"fail": 1}}')
    run = bench.launch("ordinary.py", "--health-thresholds", "limits.json", **gpus)
    assert run.code == 3
    assert len(health(run, "fail")) == 1


def test_bad_thresholds_are_wrong_usage(bench):
    (bench.cwd / "limits.json").write_text('{"remap_pendign": {"fail": 1}}')
    run = bench.launch("ordinary.py", "--health-thresholds", "limits.json")
    assert run.code == 2
    assert "--health-thresholds" in run.stderr
    assert "found 'remap_pendign'" in run.stderr
    assert "Traceback" not in run.stderr


def test_what_a_run_did_to_the_gpu_that_overflowed_first_stands_in_the_report(bench, nvml, gpus):
    run = bench.launch("gpu_breaks.py", **gpus)
    assert run.code == 4
    assert run.verdict["rank"] == 1
    well, sick = (rank["gpu"] for rank in run.report["ranks"])
    assert (sick["device"], sick["known"]) == (nvml.gpus[1], True)
    assert [change["sentence"] for change in sick["changes"]] == [
        "uncorrectable ECC errors: 0 -> 2",
        "memory row waits for a reset to be remapped: 0 -> 1",
    ]
    (xid,) = sick["xids"]
    assert (xid["number"], xid["grade"]) == (94, "fail")
    assert "contained memory error" in xid["meaning"]
    assert (well["changes"], well["xids"]) == ([], [])
    evidence = "\n".join(run.verdict["evidence"])
    assert "XID 94" in evidence
    assert "uncorrectable ECC errors: 0 -> 2" in evidence
    assert xid["next"] in run.verdict["next"]


# -- NVML that does not tell: the run goes on, and the report says unknown and why -------------------------------


def assert_unknown(run, words: str) -> None:
    """Of both ranks' GPUs in the preflight, and of the node's watch."""
    assert (run.code, run.verdict["kind"]) == (6, "unknown")
    assert run.verdict["missing"] == ["ranks 0, 1 called no module"]
    unknown = health(run, "unknown")
    assert sorted(rank for finding in unknown for rank in finding["ranks"]) == [0, 1]
    assert all(words in finding["sentence"] for finding in unknown)
    assert health(run, "fail") == health(run, "warn") == []
    assert all(rank["gpu"]["known"] is False for rank in run.report["ranks"])


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [
        ("", "* init error 4", "NVML may not be used here (permission denied)"),
        ("ANCIENT", "", "NVML is too old: this driver has no nvmlInit"),
    ],
    ids=["not permitted", "too old"],
)
@sample(1, of="what NVML does not tell")
def test_nvml_that_cannot_be_used_is_unknown(bench, nvml, gpus, kind, line, words):
    nvml.use(kind)
    nvml.says(line)
    run = bench.launch("ordinary.py", **gpus)
    assert_unknown(run, words)
    assert [(watch["grade"], watch["detail"]) for watch in run.report["nodes"][0]["gpus"]] == [("unknown", words)]
    assert [rank["gpu"]["unknown"] for rank in run.report["ranks"]] == [{"": words}] * 2


@sample(1, of="what NVML does not tell")
def test_a_driver_that_lacks_functions_is_unknown_in_these_and_known_in_the_others(bench, nvml, gpus):
    nvml.use("OLD")
    run = bench.launch("ordinary.py", **gpus)
    assert run.code == 6  # the script calls no module
    unknown = health(run, "unknown")
    assert all("recovery_action (this driver has no nvmlDeviceGetFieldValues)" in one["sentence"] for one in unknown)
    assert len(unknown) == 2
    assert all(rank["gpu"]["known"] for rank in run.report["ranks"])


@sample(1, of="what NVML does not tell")
def test_without_nvml_it_is_unknown(bench, tmp_path):
    """The loader finds a library of that name that is none, wherever the real one may be."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "libnvidia-ml.so.1").touch()
    uuids = "GPU-00000000-aaaa-bbbb-cccc-000000000000,GPU-11111111-aaaa-bbbb-cccc-111111111111"
    run = bench.launch("ordinary.py", CUDA_VISIBLE_DEVICES=uuids, LD_LIBRARY_PATH=str(tmp_path / "none"))
    words = "NVML is not on this host (libnvidia-ml.so.1)"
    assert_unknown(run, words)
    assert [(watch["grade"], watch["detail"]) for watch in run.report["nodes"][0]["gpus"]] == [("unknown", words)]


@sample(1, of="a driver that hangs")
def test_a_driver_that_hangs_costs_the_stage_its_deadline_and_is_unknown(bench, nvml, gpus):
    nvml.says("* init hang")
    run = bench.launch("ordinary.py", "--preflight-timeout", "30", **gpus)
    assert_unknown(run, "NVML did not answer within 24 s")


@sample(1, of="a driver that hangs")
def test_a_driver_that_hangs_later_does_not_hold_up_the_end(bench, nvml, gpus):
    """The counters were read before the training; at its end they cannot be."""
    run = bench.launch("gpu_hangs.py", **gpus)
    assert run.code == 0
    assert [rank["gpu"]["known"] for rank in run.report["ranks"]] == [False, False]
    assert run.report["ranks"][0]["gpu"]["unknown"] == {"": "its counters were not read after the training began"}


@sample(1, of="what NVML does not tell")
def test_a_rank_without_a_gpu_has_nothing_to_look_at(bench):
    run = bench.launch("ordinary.py")
    assert run.code == 6  # the script calls no module
    assert [health(run, grade) for grade in ("warn", "fail", "unknown")] == [[], [], []]
    assert [rank["gpu"] for rank in run.report["ranks"]] == [None, None]
