"""The questions to NVML about one GPU, in groups. A group that fails does not affect the others.

Questions are asked by name: where an older nvidia-ml-py lacks one, only that fact is unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pynvml

from .limits import CLOCK_REASONS
from .nvml import NotKnown, ask, constant, field_value, uuid_of, whole_gpu
from .nvml_child import GpuProcess, GpuReading, SampleLine

_LOADED_SAMPLES = 10
_LOADED_STEP_S = 0.05

_FABRIC_MASKS = {
    # fact: (shift, width) in healthMask, nvml.h's NVML_GPU_FABRIC_HEALTH_MASK_*; 1 true, 2 false, 0 not supported
    "fabric_degraded_bandwidth": (0, 0x3),
    "fabric_route_recovery": (2, 0x3),
    "fabric_route_unhealthy": (4, 0x3),
    "fabric_access_timeout_recovery": (6, 0x3),
    "fabric_configuration": (8, 0xF),  # 1 as it should be; any other number names a fault
}

_NVLINK_ERRORS = {
    # fact: counters of a link up to NVLink 4, and the field that means the same from NVLink 5 on
    "nvlink_crc_errors": (
        ("NVML_NVLINK_ERROR_DL_CRC_FLIT", "NVML_NVLINK_ERROR_DL_CRC_DATA"),
        "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
    ),
    "nvlink_replay_errors": (("NVML_NVLINK_ERROR_DL_REPLAY",), "NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS"),
    "nvlink_recovery_errors": (("NVML_NVLINK_ERROR_DL_RECOVERY",), "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS"),
}


@contextmanager
def facts(asked: GpuReading, *names: str) -> Iterator[None]:
    """Facts that come from one call. If it fails, they are all unknown."""
    try:
        yield
        return
    except NotKnown as error:
        if error.gpu_is_lost:
            asked.values["lost"] = 1
        why = str(error)
    except (AttributeError, IndexError, TypeError, ValueError) as error:  # an nvidia-ml-py of another shape
        why = f"{type(error).__name__}: {error}"
    asked.unknown.update({name: why for name in names if name not in asked.values})


def read(asked: GpuReading, name: str, call: Callable[..., Any], *arguments: Any) -> None:
    """One fact that comes from a call of its own."""
    with facts(asked, name):
        asked.values[name] = call(*arguments)


Group = Callable[[Any, Any, GpuReading], None]
"""(the device, the whole GPU it is or is a part of, where to put the answers)"""


def _recovery(device: Any, whole: Any, asked: GpuReading) -> None:
    read(asked, "recovery_action", field_value, whole, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")


def _ecc(device: Any, whole: Any, asked: GpuReading) -> None:
    read(asked, "ecc_enabled", lambda: ask("nvmlDeviceGetEccMode", whole)[0])
    for kind, error_type in (("corrected", 0), ("uncorrected", 1)):
        for life, counter_type in (("volatile", 0), ("aggregate", 1)):
            read(asked, f"ecc_{kind}_{life}", ask, "nvmlDeviceGetTotalEccErrors", whole, error_type, counter_type)
    read(asked, "sram_threshold_exceeded", _sram_threshold_exceeded, whole)


def _sram_threshold_exceeded(whole: Any) -> int:
    version = constant("nvmlEccSramErrorStatus_v1")
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = version
    ask("nvmlDeviceGetSramEccErrorStatus", whole, pynvml.byref(status))
    return int(bool(status.bThresholdExceeded))


def _memory_repairs(device: Any, whole: Any, asked: GpuReading) -> None:
    names = ("remap_corrected", "remap_uncorrected", "remap_pending", "remap_failed")
    with facts(asked, *names):
        asked.values.update(zip(names, map(int, ask("nvmlDeviceGetRemappedRows", whole)), strict=True))
    read(asked, "retired_pages_corrected", lambda: len(ask("nvmlDeviceGetRetiredPages", whole, 0)))
    read(asked, "retired_pages_uncorrected", lambda: len(ask("nvmlDeviceGetRetiredPages", whole, 1)))
    read(asked, "retired_pages_pending", ask, "nvmlDeviceGetRetiredPagesPendingStatus", whole)


def _temperature(device: Any, whole: Any, asked: GpuReading) -> None:
    read(asked, "temperature", ask, "nvmlDeviceGetTemperature", whole, pynvml.NVML_TEMPERATURE_GPU)
    limit = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    read(asked, "temperature_slowdown", ask, "nvmlDeviceGetTemperatureThreshold", whole, limit)


def _pcie(device: Any, whole: Any, asked: GpuReading) -> None:
    read(asked, "pcie_generation_max", ask, "nvmlDeviceGetMaxPcieLinkGeneration", whole)
    read(asked, "pcie_width_max", ask, "nvmlDeviceGetMaxPcieLinkWidth", whole)
    read(asked, "pcie_replays", ask, "nvmlDeviceGetPcieReplayCounter", whole)


def _nvlink(device: Any, whole: Any, asked: GpuReading) -> None:
    active: list[int] = []
    with facts(asked, "nvlinks_active", "nvlinks_inactive"):
        links = _link_count(whole)
        for link in range(links):
            if ask("nvmlDeviceGetNvLinkState", whole, link):
                active.append(link)
        asked.values.update(nvlinks_active=len(active), nvlinks_inactive=links - len(active))
    for name, (counters, newer) in _NVLINK_ERRORS.items():
        with facts(asked, name):
            if not active:
                raise NotKnown("no NVLink is up")
            try:
                asked.values[name] = sum(_old_link_errors(whole, link, counters) for link in active)
            except NotKnown:
                asked.values[name] = sum(field_value(whole, newer, link) for link in active)


def _link_count(whole: Any) -> int:
    try:
        return field_value(whole, "NVML_FI_DEV_NVLINK_LINK_COUNT")
    except NotKnown:  # an old driver: count until a link is not there
        for link in range(most := constant("NVML_NVLINK_MAX_LINKS")):
            try:
                ask("nvmlDeviceGetNvLinkState", whole, link)
            except NotKnown:
                if not link:
                    raise
                return link
        return most


def _old_link_errors(whole: Any, link: int, counters: tuple[str, ...]) -> int:
    """Sum of the counters that this GPU has; newer GPUs count no data CRC errors. Raises NotKnown if it has none."""
    counts, why = [], NotKnown("")
    for counter in counters:
        try:
            counts.append(ask("nvmlDeviceGetNvLinkErrorCounter", whole, link, constant(counter)))
        except NotKnown as error:
            why = error
    if not counts:
        raise why
    return sum(counts)


def _fabric(device: Any, whole: Any, asked: GpuReading) -> None:
    with facts(asked, "fabric_state", "fabric_status", *_FABRIC_MASKS):
        info = _fabric_info(whole)
        if not info.state:
            raise NotKnown("not part of an NVSwitch fabric")
        asked.values.update(fabric_state=info.state, fabric_status=info.status)
        mask = getattr(info, "healthMask", 0)
        for name, (shift, width) in _FABRIC_MASKS.items():
            if found := mask >> shift & width:
                asked.values[name] = found
            else:
                asked.unknown[name] = "Not Supported"


def _fabric_info(whole: Any) -> Any:
    """The newest form of it that this driver and this nvidia-ml-py both know."""
    for kind in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        if hasattr(pynvml, kind):
            info = getattr(pynvml, kind)()
            try:
                ask("nvmlDeviceGetGpuFabricInfoV", whole, pynvml.byref(info))
                return info
            except NotKnown as error:
                if error.gpu_is_lost:
                    raise
    if not hasattr(pynvml, "c_nvmlGpuFabricInfo_t"):
        raise NotKnown("this nvidia-ml-py has no nvmlDeviceGetGpuFabricInfo")
    info = pynvml.c_nvmlGpuFabricInfo_t()
    ask("nvmlDeviceGetGpuFabricInfo", whole, pynvml.byref(info))
    return info


def _modes(device: Any, whole: Any, asked: GpuReading) -> None:
    with facts(asked, "mig_enabled", "mig_enabled_but_unused", "mig_change_pending"):
        current, pending = ask("nvmlDeviceGetMigMode", whole)
        whole_is_used = uuid_of(device).startswith("GPU-")
        asked.values.update(
            mig_enabled=int(bool(current)),
            mig_enabled_but_unused=int(bool(current) and whole_is_used),
            mig_change_pending=int(current != pending),
        )
    read(asked, "compute_mode", ask, "nvmlDeviceGetComputeMode", whole)


_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
"""torchrun sets them for every rank, and a rank's child processes inherit them."""


def is_of_this_job(pid: int) -> bool:
    """Whether a process has this process's torchrun variables, is its ancestor, or is its child.

    Another user's process does not show its variables, and is not of this job. Raises psutil.NoSuchProcess.
    """
    process = psutil.Process(pid)
    if pid == os.getpid():
        return True
    try:
        theirs = process.environ()
    except psutil.AccessDenied:
        return False
    mine = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if mine:
        return all(theirs.get(name) == value for name, value in mine.items())
    return any(ancestor.pid == pid for ancestor in psutil.Process().parents())


def _processes(device: Any, whole: Any, asked: GpuReading) -> None:
    """Other processes on the GPU. In a container NVML may give pids that mean nothing here; those are not counted."""
    with facts(asked, "other_processes"):
        unseen = 0
        for process in ask("nvmlDeviceGetComputeRunningProcesses", device):
            try:
                if not is_of_this_job(process.pid):
                    asked.processes.append(GpuProcess(process.pid, psutil.Process(process.pid).name()))
            except psutil.NoSuchProcess:
                unseen += 1
        if unseen and not asked.processes:
            raise NotKnown(f"{unseen} process(es) that cannot be seen from here, as in a container")
        asked.values["other_processes"] = len(asked.processes)


def _clocks_and_link(device: Any, whole: Any, asked: GpuReading) -> None:
    """Sample for half a second: what holds the clocks back most of the time, and the fastest PCIe link seen."""
    reasons: list[int] = []
    for number in range(_LOADED_SAMPLES):
        if number:
            time.sleep(_LOADED_STEP_S)
        with facts(asked, *CLOCK_REASONS):
            reasons.append(clock_reasons(whole))
        for name, function in (("pcie_generation", "LinkGeneration"), ("pcie_width", "LinkWidth")):
            with facts(asked, name):
                now = ask(f"nvmlDeviceGetCurrPcie{function}", whole)
                asked.values[name] = max(now, asked.values.get(name, now))
    if reasons:
        for name, bit in CLOCK_REASONS.items():  # a change of the clocks is reported as a slowdown, for a moment
            asked.values[name] = int(sum(bool(found & bit) for found in reasons) * 2 > len(reasons))


def clock_reasons(whole: Any) -> int:
    """What holds the clocks back: bits of CLOCK_REASONS. Raises NotKnown."""
    try:
        return int(ask("nvmlDeviceGetCurrentClocksEventReasons", whole))
    except NotKnown:  # before R535 it was called
        return int(ask("nvmlDeviceGetCurrentClocksThrottleReasons", whole))


_COUNTERS: tuple[tuple[str, Group], ...] = (
    ("what it needs to recover", _recovery),
    ("ECC errors", _ecc),
    ("repairs of its memory", _memory_repairs),
    ("NVLink", _nvlink),
    ("PCIe", _pcie),
)
_GROUPS: tuple[tuple[str, Group], ...] = (
    *_COUNTERS,
    ("its NVSwitch fabric", _fabric),
    ("MIG and compute mode", _modes),
    ("its processes", _processes),
    ("its temperature", _temperature),
)


def questions(loaded: bool) -> tuple[tuple[str, Group], ...]:
    """All groups, the most telling first, because the driver may hang at any of them."""
    return (("clocks and PCIe under load", _clocks_and_link),) if loaded else _GROUPS


def ask_group(uuid: str, device: Any, group: Group) -> GpuReading:
    """The answers of one group."""
    asked = GpuReading(uuid)
    group(device, whole_gpu(device), asked)
    return asked


def read_counters(whole: Any) -> GpuReading:
    """Only the counters: cheap enough to be read in the middle of a training."""
    asked = GpuReading("")
    for _, group in _COUNTERS:
        group(whole, whole, asked)
    return asked


# How one GPU does at a moment: a few cheap questions to NVML, asked every few seconds. A child process asks them.
#
# Telemetry shows these figures and judges no GPU by them (health_grades.py does that). A question that this GPU, driver
# or nvidia-ml-py has no answer to is asked once.

_SM_CLOCK = 1
"""NVML_CLOCK_SM"""
_ALL_LINKS = 0xFFFF_FFFF
_MOST_S = 60.0
"""A pause that is longer says nothing of the clocks in it."""

Question = Callable[[Any], dict[str, float]]


def _memory(gpu: Any) -> dict[str, float]:
    memory = ask("nvmlDeviceGetMemoryInfo", gpu)
    return {"gpu_memory_used": memory.used, "gpu_memory_total": memory.total}


_QUESTIONS: tuple[Question, ...] = (
    lambda gpu: {"gpu_use": ask("nvmlDeviceGetUtilizationRates", gpu).gpu / 100},
    _memory,
    lambda gpu: {"sm_clock": ask("nvmlDeviceGetClockInfo", gpu, _SM_CLOCK)},
    lambda gpu: {"sm_clock_max": ask("nvmlDeviceGetMaxClockInfo", gpu, _SM_CLOCK)},
    lambda gpu: {"power": ask("nvmlDeviceGetPowerUsage", gpu) / 1000},
    lambda gpu: {"temperature": ask("nvmlDeviceGetTemperature", gpu, 0)},
    lambda gpu: {"ecc_corrected": ask("nvmlDeviceGetTotalEccErrors", gpu, 0, 0)},
    lambda gpu: {"ecc_uncorrected": ask("nvmlDeviceGetTotalEccErrors", gpu, 1, 0)},
    lambda gpu: {"pcie_replays": ask("nvmlDeviceGetPcieReplayCounter", gpu)},
    lambda gpu: {
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration", gpu),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth", gpu),
    },
    # nvmlDeviceGetPcieThroughput would wait for 20 ms; these count, on newer GPUs
    lambda gpu: {
        "pcie_received": field_value(gpu, "NVML_FI_DEV_PCIE_COUNT_RX_BYTES"),
        "pcie_sent": field_value(gpu, "NVML_FI_DEV_PCIE_COUNT_TX_BYTES"),
    },
    # in KiB, of all links together
    lambda gpu: {
        "nvlink_received": 1024 * field_value(gpu, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _ALL_LINKS),
        "nvlink_sent": 1024 * field_value(gpu, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", _ALL_LINKS),
    },
)


class GpuSampler:
    """Samples the telemetry of one whole GPU."""

    def __init__(self, uuid: str, gpu: Any) -> None:
        self._uuid = uuid
        self._gpu = gpu
        self._questions = list(_QUESTIONS)
        self._held_s = dict.fromkeys(CLOCK_REASONS, 0.0)
        """Why its clocks are held down -> seconds of that: at a sample and so, it is taken, since the one before."""
        self._last: float | None = None

    def sample(self, now: float, *, last: bool) -> SampleLine:
        """`now` is monotonic time in seconds."""
        values: dict[str, float] = {}
        why = ""
        for question in list(self._questions):
            try:
                values.update(question(self._gpu))
            except NotKnown as error:
                why = str(error)
                if error.is_for_good:
                    self._questions.remove(question)
            except (AttributeError, IndexError, TypeError, ValueError) as error:  # an nvidia-ml-py of another shape
                why = f"{type(error).__name__}: {error}"
                self._questions.remove(question)
        values.update(self._reasons(now))
        return SampleLine(self._uuid, values, "" if values else why, last)

    def _reasons(self, now: float) -> dict[str, float]:
        with suppress(NotKnown):
            reasons = clock_reasons(self._gpu)
            passed = min(now - self._last, _MOST_S) if self._last is not None else 0.0
            self._last = now
            for name, bit in CLOCK_REASONS.items():
                self._held_s[name] += passed if reasons & bit else 0.0
            return dict(self._held_s)
        return {}
