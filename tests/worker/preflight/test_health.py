"""The health stage of a rank, with a stand-in for the driver and a load of the test's own."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from gpuwatch.core.errors import UsageError
from gpuwatch.core.gpu.counters import gpu_of_rank
from gpuwatch.worker.preflight.inventory import check_health

DEADLINE_S = 20.0


def check(uuid, load=None, deadline_s=DEADLINE_S, thresholds=""):
    return check_health(uuid, 3, "n0", thresholds, deadline_s, load and (lambda: load))


@pytest.fixture
def gpu(nvml):
    nvml.says("* no_retirement error 3")
    return nvml.gpus[0]


class Load:
    """Remembers when it was at work."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self) -> None:
        self.times.append(time.monotonic())
        time.sleep(0.005)


def test_a_healthy_gpu_at_work_has_no_finding_and_nothing_unknown(gpu):
    load = Load()
    result = check(gpu, load)
    assert result.findings == []
    assert "unknown" not in result.detail
    assert load.times[-1] - load.times[0] > 0.4, "it worked while the clocks were looked at"
    assert _ends()


def _ends() -> bool:
    """Whether the load's thread comes to its end."""
    for thread in threading.enumerate():
        if thread.name == "gpuwatch-load":
            thread.join(DEADLINE_S)
            return not thread.is_alive()
    return True


def test_without_a_load_it_says_what_it_did_not_see(gpu):
    result = check(gpu)
    assert result.findings == []
    assert "pcie_lanes_lost (not under load)" in result.detail


def test_a_load_that_fails_costs_only_what_shows_under_load(nvml):
    def no_room() -> None:
        raise RuntimeError("CUDA out of memory\nsecond line")

    nvml.says("* no_retirement error 3", "0 recovery_action 1", "0 pcie_width 4")
    result = check(nvml.gpus[0], no_room)
    assert [finding.grade for finding in result.findings] == ["fail", "unknown"], "the width of an idle link is no news"
    assert "the load failed: CUDA out of memory)" in result.findings[1].sentence


@pytest.mark.slow
def test_a_load_that_hangs_does_not_hide_what_the_driver_says(nvml):
    release = threading.Event()
    nvml.says("* no_retirement error 3", "0 recovery_action 2")
    try:
        result = check(nvml.gpus[0], release.wait, deadline_s=6.0)
    finally:
        release.set()
    assert [finding.grade for finding in result.findings] == ["fail", "unknown"]
    assert "the driver asks for a reboot of the node" in result.findings[0].sentence
    assert "the load did not begin" in result.findings[1].sentence
    assert _ends()


def test_a_finding_names_rank_host_and_gpu(nvml):
    nvml.says("* no_retirement error 3", "0 pcie_width 8")
    (finding,) = check(nvml.gpus[0], Load()).findings
    assert (finding.stage, finding.grade, finding.subject) == ("health", "warn", "gpu")
    assert (finding.ranks, finding.hosts, finding.device) == ([3], ["n0"], nvml.gpus[0])
    assert finding.sentence == (
        f"NVIDIA H100 80GB HBM3 {nvml.gpus[0]} on n0: PCIe lanes below what GPU and slot can do, under load: 8"
    )


@pytest.mark.slow
def test_the_users_thresholds_count(nvml, tmp_path):
    nvml.says("* no_retirement error 3", "0 pcie_width 8")
    file = tmp_path / "limits.json"
    file.write_text('{"pcie_lanes_lost": {"fail": 8}}')
    assert [finding.grade for finding in check(nvml.gpus[0], Load(), thresholds=str(file)).findings] == ["fail"]
    file.write_text('{"pcie_lanes_lost": {"warn": 9}}')
    assert check(nvml.gpus[0], Load(), thresholds=str(file)).findings == []
    file.write_text("[]")
    with pytest.raises(UsageError):
        check(nvml.gpus[0], thresholds=str(file))


@pytest.mark.slow
def test_a_driver_that_hangs_is_unknown_after_the_deadline(nvml):
    nvml.says("* init hang")
    (finding,) = check(nvml.gpus[0], Load(), deadline_s=1.0).findings
    assert (finding.grade, finding.ranks) == ("unknown", [3])
    assert "did not answer within 1 s" in finding.sentence


def test_a_gpu_whose_uuid_nobody_knows_is_unknown():
    (finding,) = check("").findings
    assert (finding.grade, finding.ranks) == ("unknown", [3])


@pytest.mark.parametrize(
    ("uuid", "local_rank", "visible", "expected"),
    [
        ("GPU-a", 1, "GPU-b,GPU-c", "GPU-a"),
        ("", 1, "GPU-b, MIG-c", "MIG-c"),
        ("", 2, "GPU-b,GPU-c", ""),
        ("", 0, "0,1", ""),
        ("", 0, "", ""),
    ],
)
def test_whose_gpu_it_is(uuid, local_rank, visible, expected):
    assert gpu_of_rank(uuid, local_rank, {"CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_looked_at_under_load():
    from gpuwatch.worker.device.accelerator import CudaAccelerator

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    result = check_health(uuid, 3, "n0", "", 60.0, partial(CudaAccelerator().load, 0))
    assert not [finding for finding in result.findings if "not under load" in finding.sentence]
    assert "not under load" not in result.detail
    assert "load failed" not in result.detail
