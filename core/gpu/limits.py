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

import msgspec

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
    """A row of the table. If one of its facts is unknown, so is the check."""

    what: str
    """As it is said: `uncorrectable ECC errors since the driver was loaded`."""
    next: str
    source: str
    warn: float | None = None
    fail: float | None = None
    facts: tuple[str, ...] = ()
    """What it is made of; () is the one fact of its own name."""
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
    name: str = ""

    @property
    def needs(self) -> tuple[str, ...]:
        """The facts that it cannot do without."""
        return self.facts or (self.name,)

    def value_of(self, facts: Facts) -> int:
        """The value that the limits apply to."""
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

_ROWS = {
    "lost": HealthCheck(
        "the driver has lost the GPU, or demands a reset",
        _RESET,
        f"NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED, {NVML}",
        fail=1,
        flag=True,
    ),
    "recovery_action": HealthCheck(
        "the driver asks for a recovery",
        _RESET,
        f"recovery action flag, {MEMORY_GUIDE}error-recovery-and-response-flags.html",
        fail=1,
    ),
    "ecc_uncorrected_volatile": HealthCheck(
        "uncorrectable ECC errors since the driver was loaded", _RESET, f"volatile double-bit errors, {DCGM}", fail=1
    ),
    "ecc_uncorrected_aggregate": HealthCheck(
        "uncorrectable ECC errors in the GPU's life",
        _WATCH,
        f"contained errors are repaired by row remapping: {MEMORY_GUIDE}row-remapping.html; to warn of them is {OURS}",
        warn=1,
    ),
    **{
        f"ecc_corrected_{life}": HealthCheck(
            f"corrected ECC errors {since}",
            _WATCH,
            f"no published limit: outside the scope of {MEMORY_GUIDE}overview.html; set one for your own fleet",
        )
        for life, since in (("volatile", "since the driver was loaded"), ("aggregate", "in the GPU's life"))
    },
    "ecc_disabled": HealthCheck(
        "ECC is switched off",
        "Switch it on with nvidia-smi -e 1 and reset the GPU: without it a flipped bit is silent.",
        OURS,
        warn=1,
        facts=("ecc_enabled",),
        value=lambda facts: int(not facts["ecc_enabled"]),
        flag=True,
    ),
    "sram_threshold_exceeded": HealthCheck(
        "too many uncorrectable errors in its caches (SRAM threshold exceeded)",
        _SERVICE,
        f"L2 memory RMA policy, {MEMORY_GUIDE}rma-policy-thresholds-for-row-remapping.html",
        fail=1,
        flag=True,
        optional=True,
    ),
    "remap_failed": HealthCheck(
        "a memory row could not be remapped",
        _SERVICE,
        f"row-remapping failure flag, {MEMORY_GUIDE}rma-policy-thresholds-for-row-remapping.html",
        fail=1,
        moot_with="retired_pages_uncorrected",
        flag=True,
    ),
    "remap_pending": HealthCheck(
        "a memory row waits for a reset to be remapped",
        "Reset the GPU at the next opportunity (nvidia-smi -r); until then it may be used.",
        f"row-remapping pending flag, {MEMORY_GUIDE}error-recovery-and-response-flags.html",
        warn=1,
        moot_with="retired_pages_uncorrected",
        flag=True,
    ),
    "remap_uncorrected": HealthCheck(
        "memory rows remapped after uncorrectable errors",
        _SERVICE,
        f"512 remappings for uncorrectable errors, {MEMORY_GUIDE}rma-policy-thresholds-for-row-remapping.html",
        fail=512,
        moot_with="retired_pages_uncorrected",
    ),
    "retired_pages": HealthCheck(
        "retired memory pages",
        _SERVICE,
        f"60 in all, and 15 as the soft limit, {DCGM}; at most 64 can be retired, {RETIREMENT_GUIDE}",
        warn=15,
        fail=60,
        facts=("retired_pages_corrected", "retired_pages_uncorrected"),
        value=lambda facts: facts["retired_pages_corrected"] + facts["retired_pages_uncorrected"],
        moot_with="remap_failed",
    ),
    "retired_pages_pending": HealthCheck(
        "memory pages wait for a reboot to be retired",
        "Reload the driver or reboot the node.",
        f"{RETIREMENT_GUIDE}visibility.html",
        warn=1,
        moot_with="remap_failed",
        flag=True,
    ),
    "temperature_margin": HealthCheck(
        "degrees below the temperature at which it slows down",
        _COOLING,
        f"NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, {NVML}; the margin is {OURS}",
        warn=5,
        facts=("temperature", "temperature_slowdown"),
        value=lambda facts: facts["temperature_slowdown"] - facts["temperature"],
        low=True,
    ),
    **{
        name: HealthCheck(what, todo, f"nvmlClocksEventReasons, {NVML}", warn=1, flag=True)
        for name, what, todo in (
            ("clocks_hw_slowdown", "the hardware holds its clocks at half or less", f"{_COOLING} {_POWER}"),
            ("clocks_hw_thermal", "the hardware holds its clocks at half or less because it is hot", _COOLING),
            ("clocks_hw_power_brake", "the power supply holds its clocks at half or less (power brake)", _POWER),
            ("clocks_sw_thermal", "the driver holds its clocks down because it is hot", _COOLING),
        )
    },
    "clocks_sw_power_cap": HealthCheck(
        "its power limit holds its clocks down",
        _POWER,
        f"usual at full load: nvmlClocksEventReasons, {NVML}",
        flag=True,
    ),
    "pcie_generations_lost": HealthCheck(
        "PCIe generations below what GPU and slot can do, under load",
        _SEAT,
        f"nvmlDeviceGetMaxPcieLinkGeneration is what device and system can do together, {NVML}",
        warn=1,
        facts=("pcie_generation", "pcie_generation_max"),
        value=lambda facts: facts["pcie_generation_max"] - facts["pcie_generation"],
    ),
    "pcie_lanes_lost": HealthCheck(
        "PCIe lanes below what GPU and slot can do, under load",
        _SEAT,
        f"nvmlDeviceGetMaxPcieLinkWidth is what device and system can do together, {NVML}",
        warn=1,
        facts=("pcie_width", "pcie_width_max"),
        value=lambda facts: facts["pcie_width_max"] - facts["pcie_width"],
    ),
    "nvlinks_down": HealthCheck(
        "NVLinks down while others are up",
        _LINKS,
        f"{HEALTH_VALIDATION}nvlink allows none; a bridged PCIe GPU may have them by design",
        warn=1,
        facts=("nvlinks_active", "nvlinks_inactive"),
        value=lambda facts: facts["nvlinks_inactive"] if facts["nvlinks_active"] else 0,
        optional=True,
    ),
    "nvlinks_down_on_fabric": HealthCheck(
        "NVLinks to the NVSwitch fabric down",
        _LINKS,
        f"{HEALTH_VALIDATION}nvlink allows none",
        fail=1,
        facts=("nvlinks_inactive", "fabric_state"),
        value=lambda facts: facts["nvlinks_inactive"] if facts["fabric_state"] == 3 else 0,
        optional=True,
    ),
    **{
        f"nvlink_{kind}_errors": HealthCheck(
            f"NVLink {kinds} since the driver was loaded",
            _LINKS,
            f"from the first one on, {DCGM}",
            warn=1,
            optional=True,
        )
        for kind, kinds in (("replay", "replays"), ("recovery", "recoveries"))
    },
    "nvlink_crc_errors": HealthCheck(
        "NVLink CRC errors since the driver was loaded", _LINKS, f"only their rate matters, {DCGM}", optional=True
    ),
    "fabric_not_ready": HealthCheck(
        "it has not joined its NVSwitch fabric",
        _FABRIC,
        f"nvmlGpuFabricState_t: anything but COMPLETED, {NVML}; a GPU that works alone may be so by design: {OURS}",
        warn=1,
        facts=("fabric_state",),
        value=lambda facts: int(facts["fabric_state"] != 3),
        flag=True,
        optional=True,
    ),
    "fabric_error": HealthCheck(
        "joining its NVSwitch fabric ended with an error of NVML",
        _FABRIC,
        f"nvmlGpuFabricInfo_v3_t.status, to be checked once the state is COMPLETED, {NVML}",
        fail=1,
        facts=("fabric_state", "fabric_status"),
        value=lambda facts: facts["fabric_status"] if facts["fabric_state"] == 3 else 0,
        optional=True,
    ),
    "fabric_degraded_bandwidth": HealthCheck(
        "the bandwidth of its NVSwitch fabric is degraded",
        _FABRIC,
        f"NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW, {NVML}",
        warn=1,
        value=lambda facts: int(facts["fabric_degraded_bandwidth"] == 1),
        flag=True,
        optional=True,
    ),
    "fabric_route_unhealthy": HealthCheck(
        "a route through its NVSwitch fabric is unhealthy",
        _FABRIC,
        f"NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY, {NVML}",
        fail=1,
        value=lambda facts: int(facts["fabric_route_unhealthy"] == 1),
        flag=True,
        optional=True,
    ),
    "fabric_recovering": HealthCheck(
        "its NVSwitch fabric is being recovered",
        _FABRIC,
        f"NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_RECOVERY and _ACCESS_TIMEOUT_RECOVERY, {NVML}",
        warn=1,
        facts=("fabric_route_recovery", "fabric_access_timeout_recovery"),
        value=lambda facts: int(1 in (facts["fabric_route_recovery"], facts["fabric_access_timeout_recovery"])),
        flag=True,
        optional=True,
    ),
    "fabric_misconfigured": HealthCheck(
        "its NVSwitch fabric is configured wrongly",
        _FABRIC,
        f"NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION, {NVML}",
        fail=1,
        facts=("fabric_configuration",),
        value=lambda facts: int(facts["fabric_configuration"] > 1),
        flag=True,
        optional=True,
    ),
    "other_processes": HealthCheck(
        "processes of others on the GPU",
        "End them, or ask the scheduler for exclusive GPUs.",
        OURS,
        warn=1,
        optional=True,
    ),
    "compute_prohibited": HealthCheck(
        "its compute mode is PROHIBITED",
        "Set it with nvidia-smi -c DEFAULT.",
        f"nvmlComputeMode_t, {NVML}",
        fail=1,
        facts=("compute_mode",),
        value=lambda facts: int(facts["compute_mode"] == 2),
        flag=True,
    ),
    "exclusive_and_taken": HealthCheck(
        "its compute mode is EXCLUSIVE_PROCESS, and others have it",
        "End the other process, or set nvidia-smi -c DEFAULT.",
        f"nvmlComputeMode_t, {NVML}",
        fail=1,
        facts=("compute_mode", "other_processes"),
        value=lambda facts: int(facts["compute_mode"] == 3 and facts["other_processes"] > 0),
        flag=True,
        optional=True,
    ),
    "mig_enabled_but_unused": HealthCheck(
        "MIG is switched on, and the rank uses the whole GPU",
        "Give the rank a MIG device, or switch MIG off with nvidia-smi -mig 0.",
        OURS,
        warn=1,
        flag=True,
        optional=True,
    ),
    "mig_change_pending": HealthCheck(
        "a change of its MIG mode waits for a reset",
        "Reset the GPU with nvidia-smi -r.",
        f"nvmlDeviceGetMigMode, {NVML}",
        warn=1,
        flag=True,
        optional=True,
    ),
}
CHECKS = tuple(replace(check, name=name) for name, check in _ROWS.items())

RATES: dict[str, tuple[CheckLimits, float, str]] = {
    "pcie_replays": (CheckLimits(warn=8), 60.0, f"8 per minute, {DCGM}"),
    "nvlink_crc_errors": (CheckLimits(warn=100), 1.0, f"100 per second, {DCGM}"),
}
"""Counters whose rate matters: limits, the seconds of the rate, source."""

DEFAULTS: dict[str, CheckLimits] = {check.name: CheckLimits(check.warn, check.fail) for check in CHECKS}
