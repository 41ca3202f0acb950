"""The limits at which a fact about a GPU is a warning or a failure: one table with sources. A file may change it.

    # thresholds.toml
    [pcie_lanes_lost]
    fail = 8                # a GPU in half a slot stops the run
    [ecc_uncorrected_aggregate]
    warn = false            # never

"From 3 on" means 3 and more; in the rows that are marked `low`, 3 and less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from ..errors import UsageError
from ..preflight import Grade, PreflightFinding
from .lines import NO_ANSWER_YET, ChildAnswer, GpuReading

MEMORY_GUIDE = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/"
RETIREMENT_GUIDE = "https://docs.nvidia.com/deploy/dynamic-page-retirement/"
NVML = "https://docs.nvidia.com/deploy/nvml-api/"
DCGM = "https://docs.nvidia.com/datacenter/dcgm/ (health checks)"
HEALTH_VALIDATION = "https://docs.nvidia.com/health-validation/reference/checks/"
OURS = "gpuwatch's own choice"

LOADED_FACTS = (
    "clocks_hw_slowdown",
    "clocks_hw_thermal",
    "clocks_hw_power_brake",
    "clocks_sw_thermal",
    "clocks_sw_power_cap",
    "pcie_generation",
    "pcie_width",
)
"""An idle GPU lowers its clocks and PCIe link, so that these facts mean nothing without load."""

Facts = Mapping[str, int]


class CheckLimits(msgspec.Struct, frozen=True):
    """The limits of a warning and of a failure; None: never."""

    warn: float | None = None
    fail: float | None = None


@dataclass(frozen=True)
class HealthCheck:
    """A row of the table. If one of the facts in `needs` is unknown, so is the check."""

    name: str
    what: str
    """As it is said: `uncorrectable ECC errors since the driver was loaded`."""
    needs: tuple[str, ...]
    limits: CheckLimits
    next: str
    source: str
    value: Callable[[Facts], int] | None = None
    """Computes the value from the facts; None: the value is the one fact that it needs."""
    low: bool = False
    """Small numbers are the bad ones."""
    moot_with: str = ""
    """The fact that newer GPUs report instead. Where it is known, the check's own facts may be unsupported."""
    flag: bool = False
    """A yes or no; no number is shown."""
    optional: bool = False
    """A healthy GPU may not tell: without root, in a container, or on a board that lacks it."""

    def value_of(self, facts: Facts) -> int:
        """What is compared with the limits."""
        return self.value(facts) if self.value is not None else facts[self.needs[0]]

    def reaches(self, value: float, limit: float | None) -> bool:
        """Whether a value is as bad as a limit."""
        return limit is not None and (value <= limit if self.low else value >= limit)


_RESET = "Take the GPU out of the job; end all processes on it and reset it with nvidia-smi -r, or reboot the node."
_SERVICE = "Take the GPU out of service and run NVIDIA's field diagnostic: it may qualify for a replacement."
_WATCH = "Watch it; if it grows, run dcgmi diag -r 3 on the node."
_COOLING = "Look at the node's cooling and at what the other GPUs of the node report."
_POWER = "Look at the node's power supplies and at its power limits (nvidia-smi -q -d POWER,PERFORMANCE)."
_SEAT = "Reseat the GPU or its riser, and compare with nvidia-smi -q -d PCI on a good node."
_LINKS = (
    "Look at nvidia-smi nvlink -s and -e; reset the GPU, then reboot the node; if it stays, have the node serviced."
)
_FABRIC = "Look at the fabric manager: systemctl status nvidia-fabricmanager, and nvidia-smi -q under Fabric."

CHECKS: tuple[HealthCheck, ...] = (
    HealthCheck(
        "lost",
        "the driver has lost the GPU, or demands a reset",
        ("lost",),
        CheckLimits(fail=1),
        _RESET,
        f"NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED, {NVML}",
        flag=True,
    ),
    HealthCheck(
        "recovery_action",
        "the driver asks for a recovery",
        ("recovery_action",),
        CheckLimits(fail=1),
        _RESET,
        f"recovery action flag, {MEMORY_GUIDE}error-recovery-and-response-flags.html",
    ),
    HealthCheck(
        "ecc_uncorrected_volatile",
        "uncorrectable ECC errors since the driver was loaded",
        ("ecc_uncorrected_volatile",),
        CheckLimits(fail=1),
        _RESET,
        f"volatile double-bit errors, {DCGM}",
    ),
    HealthCheck(
        "ecc_uncorrected_aggregate",
        "uncorrectable ECC errors in the GPU's life",
        ("ecc_uncorrected_aggregate",),
        CheckLimits(warn=1),
        _WATCH,
        f"contained errors are repaired by row remapping: {MEMORY_GUIDE}row-remapping.html; to warn of them is {OURS}",
    ),
    HealthCheck(
        "ecc_corrected_volatile",
        "corrected ECC errors since the driver was loaded",
        ("ecc_corrected_volatile",),
        CheckLimits(),
        _WATCH,
        f"no published limit: outside the scope of {MEMORY_GUIDE}overview.html; set one for your own fleet",
    ),
    HealthCheck(
        "ecc_corrected_aggregate",
        "corrected ECC errors in the GPU's life",
        ("ecc_corrected_aggregate",),
        CheckLimits(),
        _WATCH,
        f"no published limit: outside the scope of {MEMORY_GUIDE}overview.html; set one for your own fleet",
    ),
    HealthCheck(
        "ecc_disabled",
        "ECC is switched off",
        ("ecc_enabled",),
        CheckLimits(warn=1),
        "Switch it on with nvidia-smi -e 1 and reset the GPU: without it a flipped bit is silent.",
        OURS,
        value=lambda facts: int(not facts["ecc_enabled"]),
        flag=True,
    ),
    HealthCheck(
        "sram_threshold_exceeded",
        "too many uncorrectable errors in its caches (SRAM threshold exceeded)",
        ("sram_threshold_exceeded",),
        CheckLimits(fail=1),
        _SERVICE,
        f"L2 memory RMA policy, {MEMORY_GUIDE}rma-policy-thresholds-for-row-remapping.html",
        flag=True,
        optional=True,
    ),
    HealthCheck(
        "remap_failed",
        "a memory row could not be remapped",
        ("remap_failed",),
        CheckLimits(fail=1),
        _SERVICE,
        f"row-remapping failure flag, {MEMORY_GUIDE}rma-policy-thresholds-for-row-remapping.html",
        moot_with="retired_pages_uncorrected",
        flag=True,
    ),
    HealthCheck(
        "remap_pending",
        "a memory row waits for a reset to be remapped",
        ("remap_pending",),
        CheckLimits(warn=1),
        "Reset the GPU at the next opportunity (nvidia-smi -r); until then it may be used.",
        f"row-remapping pending flag, {MEMORY_GUIDE}error-recovery-and-response-flags.html",
        moot_with="retired_pages_uncorrected",
        flag=True,
    ),
    HealthCheck(
        "remap_uncorrected",
        "memory rows remapped after uncorrectable errors",
        ("remap_uncorrected",),
        CheckLimits(fail=512),
        _SERVICE,
        f"512 remappings for uncorrectable errors, {MEMORY_GUIDE}rma-policy-thresholds-for-row-remapping.html",
        moot_with="retired_pages_uncorrected",
    ),
    HealthCheck(
        "retired_pages",
        "retired memory pages",
        ("retired_pages_corrected", "retired_pages_uncorrected"),
        CheckLimits(warn=15, fail=60),
        _SERVICE,
        f"60 in all, and 15 as the soft limit, {DCGM}; at most 64 can be retired, {RETIREMENT_GUIDE}",
        value=lambda facts: facts["retired_pages_corrected"] + facts["retired_pages_uncorrected"],
        moot_with="remap_failed",
    ),
    HealthCheck(
        "retired_pages_pending",
        "memory pages wait for a reboot to be retired",
        ("retired_pages_pending",),
        CheckLimits(warn=1),
        "Reload the driver or reboot the node.",
        f"{RETIREMENT_GUIDE}visibility.html",
        moot_with="remap_failed",
        flag=True,
    ),
    HealthCheck(
        "temperature_margin",
        "degrees below the temperature at which it slows down",
        ("temperature", "temperature_slowdown"),
        CheckLimits(warn=5),
        _COOLING,
        f"NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, {NVML}; the margin is {OURS}",
        value=lambda facts: facts["temperature_slowdown"] - facts["temperature"],
        low=True,
    ),
    HealthCheck(
        "clocks_hw_slowdown",
        "the hardware holds its clocks at half or less",
        ("clocks_hw_slowdown",),
        CheckLimits(warn=1),
        f"{_COOLING} {_POWER}",
        f"nvmlClocksEventReasons, {NVML}",
        flag=True,
    ),
    HealthCheck(
        "clocks_hw_thermal",
        "the hardware holds its clocks at half or less because it is hot",
        ("clocks_hw_thermal",),
        CheckLimits(warn=1),
        _COOLING,
        f"nvmlClocksEventReasons, {NVML}",
        flag=True,
    ),
    HealthCheck(
        "clocks_hw_power_brake",
        "the power supply holds its clocks at half or less (power brake)",
        ("clocks_hw_power_brake",),
        CheckLimits(warn=1),
        _POWER,
        f"nvmlClocksEventReasons, {NVML}",
        flag=True,
    ),
    HealthCheck(
        "clocks_sw_thermal",
        "the driver holds its clocks down because it is hot",
        ("clocks_sw_thermal",),
        CheckLimits(warn=1),
        _COOLING,
        f"nvmlClocksEventReasons, {NVML}",
        flag=True,
    ),
    HealthCheck(
        "clocks_sw_power_cap",
        "its power limit holds its clocks down",
        ("clocks_sw_power_cap",),
        CheckLimits(),
        _POWER,
        f"usual at full load: nvmlClocksEventReasons, {NVML}",
        flag=True,
    ),
    HealthCheck(
        "pcie_generations_lost",
        "PCIe generations below what GPU and slot can do, under load",
        ("pcie_generation", "pcie_generation_max"),
        CheckLimits(warn=1),
        _SEAT,
        f"nvmlDeviceGetMaxPcieLinkGeneration is what device and system can do together, {NVML}",
        value=lambda facts: facts["pcie_generation_max"] - facts["pcie_generation"],
    ),
    HealthCheck(
        "pcie_lanes_lost",
        "PCIe lanes below what GPU and slot can do, under load",
        ("pcie_width", "pcie_width_max"),
        CheckLimits(warn=1),
        _SEAT,
        f"nvmlDeviceGetMaxPcieLinkWidth is what device and system can do together, {NVML}",
        value=lambda facts: facts["pcie_width_max"] - facts["pcie_width"],
    ),
    HealthCheck(
        "nvlinks_down",
        "NVLinks down while others are up",
        ("nvlinks_active", "nvlinks_inactive"),
        CheckLimits(warn=1),
        _LINKS,
        f"{HEALTH_VALIDATION}nvlink allows none; a bridged PCIe GPU may have them by design",
        value=lambda facts: facts["nvlinks_inactive"] if facts["nvlinks_active"] else 0,
        optional=True,
    ),
    HealthCheck(
        "nvlinks_down_on_fabric",
        "NVLinks to the NVSwitch fabric down",
        ("nvlinks_inactive", "fabric_state"),
        CheckLimits(fail=1),
        _LINKS,
        f"{HEALTH_VALIDATION}nvlink allows none",
        value=lambda facts: facts["nvlinks_inactive"] if facts["fabric_state"] == 3 else 0,
        optional=True,
    ),
    HealthCheck(
        "nvlink_replay_errors",
        "NVLink replays since the driver was loaded",
        ("nvlink_replay_errors",),
        CheckLimits(warn=1),
        _LINKS,
        f"from the first one on, {DCGM}",
        optional=True,
    ),
    HealthCheck(
        "nvlink_recovery_errors",
        "NVLink recoveries since the driver was loaded",
        ("nvlink_recovery_errors",),
        CheckLimits(warn=1),
        _LINKS,
        f"from the first one on, {DCGM}",
        optional=True,
    ),
    HealthCheck(
        "nvlink_crc_errors",
        "NVLink CRC errors since the driver was loaded",
        ("nvlink_crc_errors",),
        CheckLimits(),
        _LINKS,
        f"only their rate matters, {DCGM}",
        optional=True,
    ),
    HealthCheck(
        "fabric_not_ready",
        "it has not joined its NVSwitch fabric",
        ("fabric_state",),
        CheckLimits(warn=1),
        _FABRIC,
        f"nvmlGpuFabricState_t: anything but COMPLETED, {NVML}; a GPU that works alone may be so by design: {OURS}",
        value=lambda facts: int(facts["fabric_state"] != 3),
        flag=True,
        optional=True,
    ),
    HealthCheck(
        "fabric_error",
        "joining its NVSwitch fabric ended with an error of NVML",
        ("fabric_state", "fabric_status"),
        CheckLimits(fail=1),
        _FABRIC,
        f"nvmlGpuFabricInfo_v3_t.status, to be checked once the state is COMPLETED, {NVML}",
        value=lambda facts: facts["fabric_status"] if facts["fabric_state"] == 3 else 0,
        optional=True,
    ),
    HealthCheck(
        "fabric_degraded_bandwidth",
        "the bandwidth of its NVSwitch fabric is degraded",
        ("fabric_degraded_bandwidth",),
        CheckLimits(warn=1),
        _FABRIC,
        f"NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW, {NVML}",
        value=lambda facts: int(facts["fabric_degraded_bandwidth"] == 1),
        flag=True,
        optional=True,
    ),
    HealthCheck(
        "fabric_route_unhealthy",
        "a route through its NVSwitch fabric is unhealthy",
        ("fabric_route_unhealthy",),
        CheckLimits(fail=1),
        _FABRIC,
        f"NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY, {NVML}",
        value=lambda facts: int(facts["fabric_route_unhealthy"] == 1),
        flag=True,
        optional=True,
    ),
    HealthCheck(
        "fabric_recovering",
        "its NVSwitch fabric is being recovered",
        ("fabric_route_recovery", "fabric_access_timeout_recovery"),
        CheckLimits(warn=1),
        _FABRIC,
        f"NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_RECOVERY and _ACCESS_TIMEOUT_RECOVERY, {NVML}",
        value=lambda facts: int(1 in (facts["fabric_route_recovery"], facts["fabric_access_timeout_recovery"])),
        flag=True,
        optional=True,
    ),
    HealthCheck(
        "fabric_misconfigured",
        "its NVSwitch fabric is configured wrongly",
        ("fabric_configuration",),
        CheckLimits(fail=1),
        _FABRIC,
        f"NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION, {NVML}",
        value=lambda facts: int(facts["fabric_configuration"] > 1),
        flag=True,
        optional=True,
    ),
    HealthCheck(
        "other_processes",
        "processes of others on the GPU",
        ("other_processes",),
        CheckLimits(warn=1),
        "End them, or ask the scheduler for exclusive GPUs.",
        OURS,
        optional=True,
    ),
    HealthCheck(
        "compute_prohibited",
        "its compute mode is PROHIBITED",
        ("compute_mode",),
        CheckLimits(fail=1),
        "Set it with nvidia-smi -c DEFAULT.",
        f"nvmlComputeMode_t, {NVML}",
        value=lambda facts: int(facts["compute_mode"] == 2),
        flag=True,
    ),
    HealthCheck(
        "exclusive_and_taken",
        "its compute mode is EXCLUSIVE_PROCESS, and others have it",
        ("compute_mode", "other_processes"),
        CheckLimits(fail=1),
        "End the other process, or set nvidia-smi -c DEFAULT.",
        f"nvmlComputeMode_t, {NVML}",
        value=lambda facts: int(facts["compute_mode"] == 3 and facts["other_processes"] > 0),
        flag=True,
        optional=True,
    ),
    HealthCheck(
        "mig_enabled_but_unused",
        "MIG is switched on, and the rank uses the whole GPU",
        ("mig_enabled_but_unused",),
        CheckLimits(warn=1),
        "Give the rank a MIG device, or switch MIG off with nvidia-smi -mig 0.",
        OURS,
        flag=True,
        optional=True,
    ),
    HealthCheck(
        "mig_change_pending",
        "a change of its MIG mode waits for a reset",
        ("mig_change_pending",),
        CheckLimits(warn=1),
        "Reset the GPU with nvidia-smi -r.",
        f"nvmlDeviceGetMigMode, {NVML}",
        flag=True,
        optional=True,
    ),
)

RATES: dict[str, tuple[CheckLimits, float, str]] = {
    "pcie_replays": (CheckLimits(warn=8), 60.0, f"8 per minute, {DCGM}"),
    "nvlink_crc_errors": (CheckLimits(warn=100), 1.0, f"100 per second, {DCGM}"),
}
"""Counters whose rate matters: limits, the seconds of the rate, source."""

DEFAULTS: dict[str, CheckLimits] = {check.name: check.limits for check in CHECKS}


def load_thresholds(path: str) -> dict[str, CheckLimits]:
    """The table's limits, replaced by those of the file; "" is no file. Raises UsageError."""
    if not path:
        return dict(DEFAULTS)
    found = _parse(Path(path))
    if not isinstance(found, dict):
        raise UsageError(f"expected a table per check in {path}, found {type(found).__name__}")
    limits = dict(DEFAULTS)
    for name, row in found.items():
        if name not in DEFAULTS:
            raise UsageError(f"expected checks out of {', '.join(DEFAULTS)} in {path}, found {name!r}")
        limits[name] = _limits(path, name, row, limits[name])
    return limits


def _parse(path: Path) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"expected a file that can be read, found {str(path)!r}: {error.strerror}") from error
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(data)
        return _toml().loads(data.decode())
    except (ValueError, msgspec.DecodeError) as error:  # of TOML, of JSON, of UTF-8
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UsageError(f"expected {kind} in {path}, found: {error}") from error


def _toml() -> ModuleType:
    try:
        return import_module("tomllib")
    except ImportError as error:
        raise UsageError("expected a .json file: this Python, older than 3.11, reads no TOML") from error


def _limits(path: str, name: str, row: Any, default: CheckLimits) -> CheckLimits:
    if not isinstance(row, dict) or not row or row.keys() - {"warn", "fail"}:
        found = ", ".join(map(str, row)) if isinstance(row, dict) and row else repr(row)
        raise UsageError(f"expected warn, fail or both for {name} in {path}, found {found}")
    limits = {"warn": default.warn, "fail": default.fail}
    for key, value in row.items():
        if value is False:
            limits[key] = None
        elif isinstance(value, int | float) and value is not True and value == value:
            limits[key] = float(value)
        else:
            raise UsageError(f"expected a number, or false for never, as {name}.{key} in {path}, found {value!r}")
    return CheckLimits(**limits)


# Turns NVML's answers into findings. Pure. A fact that is not known is `unknown`, which is neither good nor bad.

STAGE = "health"

RECOVERY_ACTIONS = {
    1: ("a reset of the GPU", "End all processes on the GPU, reset it with nvidia-smi -r, and use it again."),
    2: ("a reboot of the node", "Reboot the node: its operating system may be in an inconsistent state."),
    3: (
        "the end of all peer-to-peer traffic",
        "End all processes that use peer-to-peer traffic, then look at nvidia-smi -q again: it will ask for more.",
    ),
    4: (
        "a reset after its jobs are drained",
        "Give the GPU no new job, and reset it with nvidia-smi -r when the present ones are done.",
    ),
    5: ("a recovery of the IMEX domain", "Recover the IMEX domain of the node."),
    6: ("a reset of its PCIe bus", "Reset the PCIe bus of the GPU, or reboot the node."),
    7: ("a reboot of the system", "Reboot the node."),
}
"""nvmlDeviceGpuRecoveryAction_t: in words, and what to do."""


@dataclass(frozen=True)
class HealthGrade:
    """One check of one GPU."""

    check: str
    grade: Grade
    sentence: str
    next: str = ""
    optional: bool = False
    """If it is unknown, that is no finding."""


def judge(reading: GpuReading, limits: Mapping[str, CheckLimits]) -> list[HealthGrade]:
    """Every check that means something for this GPU, in the table's order."""
    facts = {"lost": 0, **reading.values}
    judged = []
    for check in CHECKS:
        missing = [name for name in check.needs if name not in facts]
        if not missing:
            judged.append(_compare(check, check.value_of(facts), limits[check.name], reading))
        elif check.moot_with not in facts:
            why, optional = reading.why_unknown(missing[0]), check.optional
            if missing[0] in LOADED_FACTS and missing[0] not in reading.unknown:
                why, optional = "not under load", True
            judged.append(HealthGrade(check.name, "unknown", why, optional=optional))
    return judged


def _compare(check: HealthCheck, value: int, limits: CheckLimits, reading: GpuReading) -> HealthGrade:
    grade: Grade = "ok"
    if check.reaches(value, limits.fail):
        grade = "fail"
    elif check.reaches(value, limits.warn):
        grade = "warn"
    sentence = check.what if check.flag else f"{check.what}: {value}"
    found = HealthGrade(check.name, grade, sentence, check.next)
    if check.name == "recovery_action" and value in RECOVERY_ACTIONS:
        action, todo = RECOVERY_ACTIONS[value]
        return replace(found, sentence=f"the driver asks for {action}", next=todo)
    if check.name == "other_processes" and reading.processes:
        names = ", ".join(f"{process.name} (pid {process.pid})" for process in reading.processes[:5])
        return replace(found, sentence=f"{sentence}: {names}")
    return found


def grade(
    reading: GpuReading, limits: Mapping[str, CheckLimits], ranks: list[int], host: str
) -> list[PreflightFinding]:
    """One finding for each thing that is wrong with a GPU, and one for all that is unknown. Empty: the GPU is well."""
    who = f"{reading.name or 'GPU'} {reading.device} on {host}"
    judged = judge(reading, limits)
    findings = [
        PreflightFinding(STAGE, one.grade, "gpu", ranks, [host], f"{who}: {one.sentence}", one.next, reading.device)
        for one in judged
        if one.grade in ("warn", "fail")
    ]
    unknown = [one for one in judged if one.grade == "unknown" and not one.optional]
    if unknown:
        sentence = f"{who}: NVML does not tell of {_reasons(unknown)}"
        findings.append(
            PreflightFinding(STAGE, "unknown", "gpu", ranks, [host], sentence, _how_to_know(unknown), reading.device)
        )
    return findings


def _reasons(unknown: list[HealthGrade]) -> str:
    """`remap_failed, remap_pending (Not Supported); sram_threshold_exceeded (Insufficient Permissions)`"""
    by_reason: dict[str, list[str]] = {}
    for one in unknown:
        by_reason.setdefault(one.sentence, []).append(one.check)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())


def _how_to_know(unknown: list[HealthGrade]) -> str:
    if any("Permission" in one.sentence for one in unknown):
        return "Some of it only root may read; ask whoever looks after the node, if it matters."
    return ""


def grade_answer(
    answer: ChildAnswer, device: str, limits: Mapping[str, CheckLimits], ranks: list[int], host: str
) -> tuple[list[PreflightFinding], str]:
    """Findings about one GPU from a child's answer, and one line that counts the checks."""
    reading = answer.readings.get(device)
    findings = grade(reading, limits, ranks, host) if reading is not None else []
    if answer.trouble:
        sentence = f"the health of GPU {device} on {host} is unknown: {answer.trouble}"
        known = [one for one in findings if one.grade in ("warn", "fail")]
        findings = [*known, PreflightFinding(STAGE, "unknown", "gpu", ranks, [host], sentence, answer.next, device)]
    return findings, summary(reading, limits, answer)


def summary(reading: GpuReading | None, limits: Mapping[str, CheckLimits], answer: ChildAnswer) -> str:
    """`29 checks: 24 ok, 1 warn, 4 unknown: sram_threshold_exceeded (Insufficient Permissions); ...`"""
    if reading is None:
        return answer.trouble or NO_ANSWER_YET
    judged = judge(reading, limits)
    grades = [one.grade for one in judged]
    counts = [f"{grades.count(word)} {word}" for word in ("ok", "warn", "fail", "unknown") if word in grades]
    unknown = _reasons([one for one in judged if one.grade == "unknown"])
    return f"{len(grades)} checks: {', '.join(counts)}{f': {unknown}' if unknown else ''}"
