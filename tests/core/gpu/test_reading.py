"""The real reading path, through a real child and real ctypes, against a stand-in for the driver's library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpuwatch.core.gpu.health_grades import grade, grade_answer, judge
from gpuwatch.core.gpu.limits import CHECKS, DEFAULTS
from gpuwatch.core.gpu.nvml_child import ask_nvml

pytestmark = pytest.mark.quick_here(6)

DEADLINE_S = 300.0
NO_RETIREMENT = "* no_retirement error 3"
"""An H100 remaps rows."""
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, GPU_IS_LOST = 3, 4, 9, 15


@pytest.fixture
def first(nvml):
    """UUID of the first GPU, which row remapping makes one without page retirement."""
    nvml.says(NO_RETIREMENT)
    return nvml.gpus[0]


def grades(reading):
    return {one.check: one.grade for one in judge(reading, DEFAULTS)}


def read(uuid, loaded=False):
    answer = ask_nvml([uuid], DEADLINE_S, loaded=loaded)
    assert answer.trouble == ""
    return answer.readings[uuid]


# -- one that is well --------------------------------------------------------------------------------------------


def test_a_healthy_h100_is_known_and_well_in_every_check(nvml, first):
    answer = ask_nvml([first], DEADLINE_S)
    reading = answer.readings[first]
    assert (answer.trouble, answer.finished) == ("", True)
    reading.values.update(read(first, loaded=True).values)
    assert reading.name == "NVIDIA H100 80GB HBM3"
    assert set(grades(reading).values()) == {"ok"}
    moot = {"retired_pages", "retired_pages_pending"}
    assert set(grades(reading)) == {check.name for check in CHECKS} - moot
    assert grade(reading, DEFAULTS, [0], "n0") == []


def test_without_load_the_clocks_and_the_link_stay_unknown_and_that_is_no_finding(first):
    reading = read(first)
    unknown = {name for name, found in grades(reading).items() if found == "unknown"}
    assert unknown == {name for name in grades(reading) if name.startswith("clocks_")} | {
        "pcie_generations_lost",
        "pcie_lanes_lost",
    }
    assert grade(reading, DEFAULTS, [0], "n0") == []


def test_without_a_uuid_every_gpu_is_read(nvml):
    nvml.says("1 temperature 60")
    answer = ask_nvml([], DEADLINE_S)
    assert list(answer.readings) == list(nvml.gpus)
    assert [reading.values["temperature"] for reading in answer.readings.values()] == [41, 60]


# -- which GPU ---------------------------------------------------------------------------------------------------


def test_a_gpu_is_found_by_its_uuid_with_and_without_prefix(nvml):
    nvml.says("1 temperature 60")
    second = nvml.gpus[1]
    for uuid in (second, second.removeprefix("GPU-")):
        assert ask_nvml([uuid], DEADLINE_S).readings[uuid].values["temperature"] == 60


def test_a_mig_device_has_the_facts_of_the_gpu_it_is_a_part_of(nvml):
    nvml.says("0 mig_mode 1", "0 mig_room 7", "0 temperature 60", "0 ecc_uncorrected_volatile 2")
    for uuid in (nvml.migs[1], nvml.migs[1].removeprefix("MIG-")):
        reading = read(uuid)
        assert (reading.values["temperature"], reading.values["ecc_uncorrected_volatile"]) == (60, 2)
        assert grades(reading)["mig_enabled_but_unused"] == "ok"


def test_the_whole_of_a_gpu_with_mig_is_a_warning(nvml):
    nvml.says("0 mig_mode 1")
    assert grades(read(nvml.gpus[0]))["mig_enabled_but_unused"] == "warn"


def test_a_uuid_that_nvml_does_not_know_is_unknown(nvml):
    uuid = "GPU-99999999-aaaa-bbbb-cccc-999999999999"
    reading = read(uuid)
    (finding,) = grade(reading, DEFAULTS, [3], "n0")
    assert finding.grade == "unknown"
    assert "not asked" in finding.sentence


# -- one that is sick --------------------------------------------------------------------------------------------

SICK = [
    ("recovery_action 2", "recovery_action", "fail", "a reboot of the node"),
    ("recovery_action 7", "recovery_action", "fail", "a reboot of the system"),
    ("ecc_uncorrected_volatile 1", "ecc_uncorrected_volatile", "fail", "uncorrectable ECC errors"),
    ("ecc_uncorrected_aggregate 4", "ecc_uncorrected_aggregate", "warn", "life: 4"),
    ("ecc_mode 0", "ecc_disabled", "warn", "ECC is switched off"),
    ("sram_threshold_exceeded 1", "sram_threshold_exceeded", "fail", "SRAM threshold exceeded"),
    ("remap_failed 1", "remap_failed", "fail", "could not be remapped"),
    ("remap_pending 1", "remap_pending", "warn", "waits for a reset"),
    ("remap_uncorrected 512", "remap_uncorrected", "fail", "uncorrectable errors: 512"),
    ("temperature 88", "temperature_margin", "warn", "slows down: 4"),
    ("clock_reasons 0x8", "clocks_hw_slowdown", "warn", "half or less"),
    ("clock_reasons 0x48", "clocks_hw_thermal", "warn", "because it is hot"),
    ("clock_reasons 0x80", "clocks_hw_power_brake", "warn", "power brake"),
    ("clock_reasons 0x20", "clocks_sw_thermal", "warn", "because it is hot"),
    ("pcie_generation 3", "pcie_generations_lost", "warn", "under load: 2"),
    ("pcie_width 8", "pcie_lanes_lost", "warn", "under load: 8"),
    ("nvlinks_inactive 2", "nvlinks_down_on_fabric", "fail", "down: 2"),
    ("nvlink_recovery_errors 1", "nvlink_recovery_errors", "warn", "recoveries"),
    ("nvlink_replay_errors 9", "nvlink_replay_errors", "warn", "replays"),
    ("fabric_state 2", "fabric_not_ready", "warn", "not joined"),
    ("fabric_status 999", "fabric_error", "fail", "error of NVML: 999"),
    ("fabric_health 0x1a9", "fabric_degraded_bandwidth", "warn", "bandwidth"),
    ("fabric_health 0x19a", "fabric_route_unhealthy", "fail", "unhealthy"),
    ("fabric_health 0x1a6", "fabric_recovering", "warn", "being recovered"),
    ("fabric_health 0x5aa", "fabric_misconfigured", "fail", "configured wrongly"),
    ("compute_mode 2", "compute_prohibited", "fail", "PROHIBITED"),
    ("mig_mode_pending 1", "mig_change_pending", "warn", "waits for a reset"),
]


@pytest.mark.quick(3)
@pytest.mark.sample(4)
@pytest.mark.parametrize(("line", "check", "expected", "words"), SICK, ids=[line for line, *_ in SICK])
def test_each_sickness_is_found_on_the_gpu_that_has_it_and_only_there(nvml, line, check, expected, words):
    nvml.says(NO_RETIREMENT, f"1 {line}")
    answer = ask_nvml(list(nvml.gpus), DEADLINE_S)
    well, sick = (answer.readings[uuid] for uuid in nvml.gpus)
    if check.startswith(("clocks", "pcie")):
        sick.values.update(read(nvml.gpus[1], loaded=True).values)
    assert grades(sick)[check] == expected
    assert grade(well, DEFAULTS, [0], "n0") == []
    found = [finding for finding in grade(sick, DEFAULTS, [5], "n0") if words in finding.sentence]
    assert [(finding.grade, finding.ranks, finding.device) for finding in found] == [(expected, [5], nvml.gpus[1])]
    assert found[0].next.endswith(".")


def test_a_gpu_of_the_generation_before_retires_pages(nvml):
    nvml.says(
        "* remap_corrected error 3",
        "* retired_pages_corrected 40",
        "* retired_pages_uncorrected 20",
        "* retired_pages_pending 1",
    )
    found = grades(read(nvml.gpus[0]))
    assert (found["retired_pages"], found["retired_pages_pending"]) == ("fail", "warn")
    assert not {"remap_failed", "remap_pending", "remap_uncorrected"} & set(found)


@pytest.mark.parametrize(
    ("lines", "grade_"), [(["0 clock_reasons_at_first 0x8"], "ok"), (["0 clock_reasons 8"], "warn")]
)
def test_a_slowdown_for_a_moment_is_a_change_of_the_clocks_and_no_finding(nvml, lines, grade_):
    nvml.says(*lines)
    assert grades(read(nvml.gpus[0], loaded=True))["clocks_hw_slowdown"] == grade_


def test_a_gpu_that_is_not_part_of_the_fabric_beside_it_may_have_no_links(nvml):
    """One GPU of eight, given to a virtual machine."""
    nvml.says(NO_RETIREMENT, "0 fabric_state 1", "0 nvlinks_inactive 18")
    found = grades(read(nvml.gpus[0]))
    assert (found["nvlinks_down"], found["nvlinks_down_on_fabric"], found["fabric_not_ready"]) == ("ok", "ok", "warn")


def test_a_lost_gpu_fails_and_says_so(nvml):
    nvml.says(f"1 handle error {GPU_IS_LOST}")
    findings, _ = grade_answer(ask_nvml([nvml.gpus[1]], DEADLINE_S), nvml.gpus[1], DEFAULTS, [1], "n0")
    assert [finding.grade for finding in findings] == ["fail", "unknown"]
    assert "the driver has lost the GPU" in findings[0].sentence


def test_a_gpu_that_is_lost_while_it_is_asked_fails_too(nvml):
    nvml.says(f"1 ecc_corrected_volatile error {GPU_IS_LOST}")
    assert grades(read(nvml.gpus[1]))["lost"] == "fail"


def test_nvlink_5_counts_its_errors_elsewhere(nvml, first):
    nvml.says(NO_RETIREMENT, "* nvlink_counters error 3", "0 nvlink5_errors 6")
    values = read(first).values
    assert (values["nvlink_crc_errors"], values["nvlink_recovery_errors"]) == (6, 6)


# -- others on it ------------------------------------------------------------------------------------------------


@pytest.fixture
def stranger():
    """A process of this user that no torchrun has started."""
    clean = {name: value for name, value in os.environ.items() if name not in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR")}
    process = subprocess.Popen(["sleep", "60"], env=clean)
    yield process
    process.kill()
    process.wait()


def test_a_process_of_somebody_else_is_named(nvml, first, stranger):
    nvml.says(NO_RETIREMENT, f"0 process {stranger.pid}")
    (finding,) = grade(read(first), DEFAULTS, [0], "n0")
    assert (finding.grade, finding.sentence.endswith(f"sleep (pid {stranger.pid})")) == ("warn", True)
    nvml.says(NO_RETIREMENT, f"0 process {stranger.pid}", "0 compute_mode 3")
    assert grades(read(first))["exclusive_and_taken"] == "fail"


def test_a_process_of_the_same_torchrun_is_not_another(nvml, first, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("MASTER_PORT", "29500")
    process = subprocess.Popen(["sleep", "60"])
    try:
        nvml.says(NO_RETIREMENT, f"0 process {process.pid}")
        assert read(first).values["other_processes"] == 0
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_not_to_be_seen_from_here_is_unknown_and_accused_of_nothing(nvml, first):
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    nvml.says(NO_RETIREMENT, f"0 process {process.pid}")
    reading = read(first)
    assert "container" in reading.unknown["other_processes"]
    assert grade(reading, DEFAULTS, [0], "n0") == []


# -- NVML that does not tell -------------------------------------------------------------------------------------


def test_not_supported_is_unknown_and_not_healthy(nvml, first):
    nvml.says(NO_RETIREMENT, *(f"0 ecc_{name} error {NOT_SUPPORTED}" for name in ("mode", "corrected_volatile")))
    (finding,) = grade(read(first), DEFAULTS, [2], "n0")
    assert (finding.grade, finding.ranks) == ("unknown", [2])
    assert "ecc_corrected_volatile, ecc_disabled (Not Supported)" in finding.sentence


def test_what_only_root_may_read_is_no_finding_and_is_told_in_the_summary(nvml, first):
    nvml.says(NO_RETIREMENT, f"0 sram_threshold_exceeded error {NO_PERMISSION}")
    findings, detail = grade_answer(ask_nvml([first], DEADLINE_S), first, DEFAULTS, [0], "n0")
    assert findings == []
    assert "sram_threshold_exceeded (Insufficient Permissions)" in detail


def test_an_old_driver_lacks_functions_and_the_rest_is_read(nvml):
    nvml.use("OLD")
    reading = read(nvml.gpus[0])
    found = grades(reading)
    assert found["ecc_uncorrected_volatile"] == "ok"
    clocks = grades(read(nvml.gpus[0], loaded=True))
    assert clocks["clocks_hw_slowdown"] == "ok", "by the name that the function had then"
    assert found["recovery_action"] == "unknown"
    assert reading.unknown["recovery_action"] == "this driver has no nvmlDeviceGetFieldValues"
    assert reading.unknown["fabric_state"].startswith("this driver has no nvmlDeviceGetGpuFabricInfo")
    assert found["nvlinks_down"] == "ok", "counted link by link"


def test_an_old_nvidia_ml_py_lacks_functions_and_the_rest_is_read(nvml, first, tmp_path, monkeypatch):
    """A release before the recovery action and the fabric were known."""
    package = tmp_path / "old"
    package.mkdir()
    (package / "sitecustomize.py").write_text(
        "import pynvml\n"
        "for name in ('NVML_FI_DEV_GET_GPU_RECOVERY_ACTION', 'nvmlDeviceGetRemappedRows',\n"
        "             'c_nvmlGpuFabricInfo_v3_t', 'c_nvmlGpuFabricInfo_v2_t', 'c_nvmlGpuFabricInfo_t',\n"
        "             'c_nvmlEccSramErrorStatus_v1_t', 'nvmlDeviceGetCurrentClocksEventReasons'):\n"
        "    delattr(pynvml, name)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    reading = read(first)
    assert reading.unknown["recovery_action"] == "this nvidia-ml-py has no NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
    assert reading.unknown["remap_failed"] == "this nvidia-ml-py has no nvmlDeviceGetRemappedRows"
    assert reading.unknown["fabric_state"] == "this nvidia-ml-py has no nvmlDeviceGetGpuFabricInfo"
    assert "c_nvmlEccSramErrorStatus_v1_t" in reading.unknown["sram_threshold_exceeded"]
    assert grades(read(first, loaded=True))["clocks_hw_slowdown"] == "ok"


TROUBLES = [
    ("init error 4", "", "NVML may not be used here (permission denied)"),
    ("init error 9", "", "the NVIDIA driver is not loaded"),
    ("init error 18", "", "NVML and the driver have different versions"),
    ("init error 17", "", "NVML cannot be initialised: The operating system has blocked the request."),
    ("", "ANCIENT", "NVML is too old: this driver has no nvmlInit"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("line", "kind", "why"), TROUBLES, ids=[why for *_, why in TROUBLES])
def test_nvml_that_does_not_start_is_unknown_with_the_reason(nvml, line, kind, why):
    nvml.use(kind)
    nvml.says(f"* {line}" if line else "")
    answer = ask_nvml([nvml.gpus[0]], DEADLINE_S)
    assert answer.trouble == why
    findings, detail = grade_answer(answer, nvml.gpus[0], DEFAULTS, [4], "n0")
    assert [(finding.grade, finding.ranks) for finding in findings] == [("unknown", [4])]
    assert why in findings[0].sentence
    assert detail == why


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this host has NVML")
def test_without_nvml_it_is_unknown_with_the_reason():
    answer = ask_nvml([], DEADLINE_S)
    assert answer.trouble == "NVML is not on this host (libnvidia-ml.so.1)"
    assert "utility" in answer.next


@pytest.mark.slow  # the deadline is long, so that a slow machine gets as far as the driver's hang
def test_a_driver_that_hangs_at_its_start_is_unknown_after_the_deadline(nvml):
    nvml.says("* init hang")
    answer = ask_nvml([nvml.gpus[0]], 15.0)
    assert answer.trouble == "NVML did not answer within 15 s when asked for its start"


@pytest.mark.slow
def test_what_was_told_before_the_driver_hung_is_kept(nvml):
    nvml.says("0 recovery_action 1", "0 nvlink_state hang")
    answer = ask_nvml([nvml.gpus[0]], 15.0)
    findings, _ = grade_answer(answer, nvml.gpus[0], DEFAULTS, [0], "n0")
    assert [finding.grade for finding in findings] == ["fail", "unknown"]
    assert "did not answer within 15 s when asked for NVLink" in findings[1].sentence


def test_a_child_that_dies_is_unknown_with_its_exit_code(nvml, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'gpuwatch.core.gpu' in sys.orig_argv: import os; os._exit(7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert ask_nvml([nvml.gpus[0]], DEADLINE_S).trouble == "the process that reads NVML ended with exit code 7"


# -- a real one --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_real_nvml_tells_of_every_gpu_of_this_host():
    answer = ask_nvml([], 60.0)
    assert (answer.trouble, answer.finished) == ("", True)
    assert answer.readings
    for uuid, reading in answer.readings.items():
        assert uuid.startswith("GPU-")
        assert reading.name
        assert 0 < reading.values["temperature"] < 110
        named = {fact for check in CHECKS for fact in check.needs} - {"lost"}
        assert named <= reading.values.keys() | reading.unknown.keys(), "every fact is known, or it is said why not"


@pytest.mark.gpu
def test_the_real_nvml_agrees_with_cuda_on_who_is_who():
    torch = pytest.importorskip("torch")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(properties.uuid)
        answer = ask_nvml([uuid], 60.0)
        assert answer.readings[uuid].name == properties.name
