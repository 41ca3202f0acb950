"""The limits at which a fact about a GPU is a warning or a failure: one table. A file may change it.

docs/preflight.md has the sources of the limits, and such a file.
"From 3 on" means 3 and more; in the rows that are marked `low`, 3 and less.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import msgspec

CLOCK_REASONS = {
    "clocks_hw_slowdown": 0x08,
    "clocks_sw_thermal": 0x20,
    "clocks_hw_thermal": 0x40,
    "clocks_hw_power_brake": 0x80,
    "clocks_sw_power_cap": 0x04,
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons; the older name of that function gives the same."""
LOADED_FACTS = (*CLOCK_REASONS, "pcie_generation", "pcie_width")
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
    warn: float | None = None
    fail: float | None = None
    value: Callable[..., int] | None = None
    """Computes the value from the facts that its parameters name; None: the value is the fact of the check's name."""
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
        return tuple(inspect.signature(self.value).parameters) if self.value is not None else (self.name,)

    def value_of(self, facts: Facts) -> int:
        """The value that the limits apply to."""
        needed = [facts[name] for name in self.needs]
        return self.value(*needed) if self.value is not None else needed[0]

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

_yes_or_no = partial(HealthCheck, flag=True)

_ROWS = {
    # memory
    "lost": _yes_or_no("the driver has lost the GPU, or demands a reset", _RESET, fail=1),
    "recovery_action": HealthCheck("the driver asks for a recovery", _RESET, fail=1),
    "ecc_uncorrected_volatile": HealthCheck("uncorrectable ECC errors since the driver was loaded", _RESET, fail=1),
    "ecc_uncorrected_aggregate": HealthCheck("uncorrectable ECC errors in the GPU's life", _WATCH, warn=1),
    "ecc_corrected_volatile": HealthCheck("corrected ECC errors since the driver was loaded", _WATCH),
    "ecc_corrected_aggregate": HealthCheck("corrected ECC errors in the GPU's life", _WATCH),
    "ecc_disabled": _yes_or_no(
        "ECC is switched off",
        "Switch it on with nvidia-smi -e 1 and reset the GPU: without it a flipped bit is silent.",
        warn=1,
        value=lambda ecc_enabled: int(not ecc_enabled),
    ),
    "sram_threshold_exceeded": _yes_or_no(
        "too many uncorrectable errors in its caches (SRAM threshold exceeded)", _SERVICE, fail=1, optional=True
    ),
    "remap_failed": _yes_or_no(
        "a memory row could not be remapped", _SERVICE, fail=1, moot_with="retired_pages_uncorrected"
    ),
    "remap_pending": _yes_or_no(
        "a memory row waits for a reset to be remapped",
        "Reset the GPU at the next opportunity (nvidia-smi -r); until then it may be used.",
        warn=1,
        moot_with="retired_pages_uncorrected",
    ),
    "remap_uncorrected": HealthCheck(
        "memory rows remapped after uncorrectable errors", _SERVICE, fail=512, moot_with="retired_pages_uncorrected"
    ),
    "retired_pages": HealthCheck(
        "retired memory pages",
        _SERVICE,
        warn=15,
        fail=60,
        value=lambda retired_pages_corrected, retired_pages_uncorrected: (
            retired_pages_corrected + retired_pages_uncorrected
        ),
        moot_with="remap_failed",
    ),
    "retired_pages_pending": _yes_or_no(
        "memory pages wait for a reboot to be retired",
        "Reload the driver or reboot the node.",
        warn=1,
        moot_with="remap_failed",
    ),
    # clocks
    "temperature_margin": HealthCheck(
        "degrees below the temperature at which it slows down",
        _COOLING,
        warn=5,
        low=True,
        value=lambda temperature, temperature_slowdown: temperature_slowdown - temperature,
    ),
    "clocks_hw_slowdown": _yes_or_no("the hardware holds its clocks at half or less", f"{_COOLING} {_POWER}", warn=1),
    "clocks_hw_thermal": _yes_or_no(
        "the hardware holds its clocks at half or less because it is hot", _COOLING, warn=1
    ),
    "clocks_hw_power_brake": _yes_or_no(
        "the power supply holds its clocks at half or less (power brake)", _POWER, warn=1
    ),
    "clocks_sw_thermal": _yes_or_no("the driver holds its clocks down because it is hot", _COOLING, warn=1),
    "clocks_sw_power_cap": _yes_or_no("its power limit holds its clocks down", _POWER),
    # links
    "pcie_generations_lost": HealthCheck(
        "PCIe generations below what GPU and slot can do, under load",
        _SEAT,
        warn=1,
        value=lambda pcie_generation, pcie_generation_max: pcie_generation_max - pcie_generation,
    ),
    "pcie_lanes_lost": HealthCheck(
        "PCIe lanes below what GPU and slot can do, under load",
        _SEAT,
        warn=1,
        value=lambda pcie_width, pcie_width_max: pcie_width_max - pcie_width,
    ),
    "nvlinks_down": HealthCheck(
        "NVLinks down while others are up",
        _LINKS,
        warn=1,
        value=lambda nvlinks_active, nvlinks_inactive: nvlinks_inactive if nvlinks_active else 0,
        optional=True,
    ),
    "nvlinks_down_on_fabric": HealthCheck(
        "NVLinks to the NVSwitch fabric down",
        _LINKS,
        fail=1,
        value=lambda nvlinks_inactive, fabric_state: nvlinks_inactive if fabric_state == 3 else 0,
        optional=True,
    ),
    "nvlink_replay_errors": HealthCheck("NVLink replays since the driver was loaded", _LINKS, warn=1, optional=True),
    "nvlink_recovery_errors": HealthCheck(
        "NVLink recoveries since the driver was loaded", _LINKS, warn=1, optional=True
    ),
    "nvlink_crc_errors": HealthCheck("NVLink CRC errors since the driver was loaded", _LINKS, optional=True),
    "fabric_not_ready": _yes_or_no(
        "it has not joined its NVSwitch fabric",
        _FABRIC,
        warn=1,
        value=lambda fabric_state: int(fabric_state != 3),
        optional=True,
    ),
    "fabric_error": HealthCheck(
        "joining its NVSwitch fabric ended with an error of NVML",
        _FABRIC,
        fail=1,
        value=lambda fabric_state, fabric_status: fabric_status if fabric_state == 3 else 0,
        optional=True,
    ),
    # masks: 1 is true, 2 false, 0 not supported
    "fabric_degraded_bandwidth": _yes_or_no(
        "the bandwidth of its NVSwitch fabric is degraded",
        _FABRIC,
        warn=1,
        value=lambda fabric_degraded_bandwidth: int(fabric_degraded_bandwidth == 1),
        optional=True,
    ),
    "fabric_route_unhealthy": _yes_or_no(
        "a route through its NVSwitch fabric is unhealthy",
        _FABRIC,
        fail=1,
        value=lambda fabric_route_unhealthy: int(fabric_route_unhealthy == 1),
        optional=True,
    ),
    "fabric_recovering": _yes_or_no(
        "its NVSwitch fabric is being recovered",
        _FABRIC,
        warn=1,
        value=lambda fabric_route_recovery, fabric_access_timeout_recovery: int(
            1 in (fabric_route_recovery, fabric_access_timeout_recovery)
        ),
        optional=True,
    ),
    "fabric_misconfigured": _yes_or_no(
        "its NVSwitch fabric is configured wrongly",
        _FABRIC,
        fail=1,
        value=lambda fabric_configuration: int(fabric_configuration > 1),
        optional=True,
    ),
    # who may use it
    "other_processes": HealthCheck(
        "processes of others on the GPU", "End them, or ask the scheduler for exclusive GPUs.", warn=1, optional=True
    ),
    "compute_prohibited": _yes_or_no(
        "its compute mode is PROHIBITED",
        "Set it with nvidia-smi -c DEFAULT.",
        fail=1,
        value=lambda compute_mode: int(compute_mode == 2),
    ),
    "exclusive_and_taken": _yes_or_no(
        "its compute mode is EXCLUSIVE_PROCESS, and others have it",
        "End the other process, or set nvidia-smi -c DEFAULT.",
        fail=1,
        value=lambda compute_mode, other_processes: int(compute_mode == 3 and other_processes > 0),
        optional=True,
    ),
    "mig_enabled_but_unused": _yes_or_no(
        "MIG is switched on, and the rank uses the whole GPU",
        "Give the rank a MIG device, or switch MIG off with nvidia-smi -mig 0.",
        warn=1,
        optional=True,
    ),
    "mig_change_pending": _yes_or_no(
        "a change of its MIG mode waits for a reset", "Reset the GPU with nvidia-smi -r.", warn=1, optional=True
    ),
}

CHECKS = tuple(replace(check, name=name) for name, check in _ROWS.items())

RATES = {"pcie_replays": (8, 60.0), "nvlink_crc_errors": (100, 1.0)}
"""Counters whose rate matters: how many are a warning, in how many seconds. Both from DCGM's health checks."""

DEFAULTS: dict[str, CheckLimits] = {check.name: CheckLimits(check.warn, check.fail) for check in CHECKS}
