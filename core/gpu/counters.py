"""What a run has done to a GPU: how its counters have changed, and what the driver's XIDs mean. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from ..events.node_events import GpuCounters, GpuHealth, GpuXid
from ..preflight import Grade
from .limits import RATES

_WORDS: dict[str, tuple[str, Grade]] = {
    "lost": ("the driver has lost the GPU, or demands a reset", "fail"),
    "recovery_action": ("recovery that the driver asks for (nvmlDeviceGpuRecoveryAction_t)", "fail"),
    "ecc_uncorrected_volatile": ("uncorrectable ECC errors", "fail"),
    "ecc_corrected_volatile": ("corrected ECC errors", "warn"),
    "sram_threshold_exceeded": ("SRAM threshold exceeded", "fail"),
    "remap_corrected": ("memory rows remapped after corrected errors", "warn"),
    "remap_uncorrected": ("memory rows remapped after uncorrectable errors", "fail"),
    "remap_pending": ("memory row waits for a reset to be remapped", "warn"),
    "remap_failed": ("memory row could not be remapped", "fail"),
    "retired_pages_corrected": ("memory pages retired after corrected errors", "warn"),
    "retired_pages_uncorrected": ("memory pages retired after uncorrectable errors", "fail"),
    "retired_pages_pending": ("memory pages wait to be retired", "warn"),
    "nvlinks_inactive": ("NVLinks down", "fail"),
    "nvlink_crc_errors": ("NVLink CRC errors", "ok"),
    "nvlink_replay_errors": ("NVLink replays", "warn"),
    "nvlink_recovery_errors": ("NVLink recoveries", "warn"),
    "pcie_replays": ("PCIe replays", "ok"),
}
"""Counter -> its name in words, and the grade of its growth. The lifetime totals grow with these counters."""


class CounterChange(msgspec.Struct, frozen=True):
    """A counter that has changed. `uncorrectable ECC errors: 0 -> 2`"""

    counter: str
    before: int
    after: int
    grade: Grade
    sentence: str


class GpuSincePreflight(msgspec.Struct, frozen=True):
    """One GPU, from before the training to its last reading."""

    device: str
    known: bool
    """Whether there are two readings to compare."""
    changes: list[CounterChange] = []
    xids: list[GpuXid] = []
    unknown: dict[str, str] = {}
    """Counter -> why it could not be compared; "" -> why nothing could."""
    seconds: float = 0.0
    """Between the two readings."""

    @property
    def grade(self) -> Grade:
        """The worst of all."""
        grades = {change.grade for change in self.changes} | {xid.grade for xid in self.xids}
        order: tuple[Grade, ...] = ("fail", "warn")
        return next((grade for grade in order if grade in grades), "ok" if self.known else "unknown")


def difference(before: GpuCounters, after: GpuCounters) -> list[CounterChange]:
    """Counters that have changed, the worst first."""
    seconds = max((after.time_ns - before.time_ns) / 1e9, 1e-9)
    changes = []
    for name, (words, grade) in _WORDS.items():
        first, last = before.counters.get(name, 0 if name == "lost" else None), after.counters.get(name)
        if first is None or last is None or first == last:
            continue
        if last < first:
            changes.append(CounterChange(name, first, last, "ok", f"{words}: {first} -> {last}, counter restarted"))
            continue
        sentence = f"{words}: {first} -> {last}"
        if name in RATES:
            limit, over_s = RATES[name]
            rate = (last - first) / max(seconds / over_s, 1.0)
            if rate >= limit:
                grade = "warn"
                sentence += f", {rate:.0f} in {over_s:.0f} s"
        changes.append(CounterChange(name, first, last, grade, sentence))
    order: tuple[Grade, ...] = ("fail", "warn", "unknown", "ok")
    return sorted(changes, key=lambda change: order.index(change.grade))


def since_preflight(events: Iterable[GpuXid | GpuCounters | GpuHealth], device: str) -> GpuSincePreflight:
    """What happened to a GPU since the training began. `device` is what its rank calls it: the UUID of the GPU or of
    a MIG device on it, with or without `GPU-`."""
    events = list(events)
    readings = [
        event
        for event in events
        if isinstance(event, GpuCounters) and _bare(device) in map(_bare, (event.device, *event.mig))
    ]
    readings.sort(key=lambda reading: reading.time_ns)
    whole = readings[0].device if readings else device
    xids = sorted(
        (event for event in events if isinstance(event, GpuXid) and _bare(event.device) == _bare(whole)),
        key=lambda xid: xid.time_ns,
    )
    before = next((reading for reading in readings if reading.moment == "before"), None)
    if before is None or readings[-1] is before:
        why = next((event.detail for event in events if isinstance(event, GpuHealth) and event.grade != "ok"), "")
        missing = "before the training" if before is None else "after the training began"
        return GpuSincePreflight(whole, False, xids=xids, unknown={"": why or f"its counters were not read {missing}"})
    after = readings[-1]
    unknown = {name: why for name, why in {**before.unknown, **after.unknown}.items() if name in _WORDS}
    seconds = (after.time_ns - before.time_ns) / 1e9
    return GpuSincePreflight(whole, True, difference(before, after), xids, unknown, round(seconds, 3))


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


# Which GPU a rank has, as far as that is known without asking it. Pure.


def gpu_of_rank(uuid: str, local_rank: int, environment: Mapping[str, str]) -> str:
    """UUID of the rank's GPU: from CUDA, or else from CUDA_VISIBLE_DEVICES if that lists UUIDs; "" is none.

    The second source helps when CUDA does not work at all, which is when the GPU's health matters most.
    """
    if uuid:
        return uuid
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if local_rank < len(visible) and visible[local_rank].startswith(("GPU-", "MIG-")):
        return visible[local_rank]
    return ""


# From NVIDIA's catalogue for Ampere and newer GPUs, the columns Description and Resolution Bucket:
# https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html


class XidMeaning(NamedTuple):
    """`grade` is the GPU's: `ok` if the script is the likely cause."""

    meaning: str
    next: str
    grade: Grade


_SCRIPT = (
    "Most likely the script: run it under compute-sanitizer; if other scripts meet it on this GPU, have it tested."
)
_RESTART = "Start the job again; if it comes back on this GPU, take the GPU out and report it."
_RESET = "Take the GPU out of the job and reset it (nvidia-smi -r); if it comes back, report the GPU."
_REBOOT = "Take the node out and restart it; look at its kernel log for PCIe errors; if it comes back, report the GPU."
_REPORT = "The job may go on; report the GPU to the node's administrator."
_NVLINK = "Look at nvidia-smi nvlink -e on this GPU and on its peers: the fault may be at the other end; reset both."
_OTHERS = "A consequence: look at the XIDs before it."
_NOTHING = "No action is needed."
_x = XidMeaning

XIDS: dict[int, XidMeaning] = {
    8: _x("GPU stopped processing", _RESTART, "warn"),
    11: _x("invalid or corrupted push buffer stream", _SCRIPT, "ok"),
    13: _x("graphics engine exception: mostly an access out of bounds in a kernel", _SCRIPT, "ok"),
    25: _x("invalid or illegal push buffer stream", _SCRIPT, "ok"),
    31: _x("GPU memory page fault: mostly an illegal address in a kernel", _SCRIPT, "ok"),
    32: _x("invalid or corrupted push buffer stream: mostly the quality of the PCIe link", _RESTART, "warn"),
    37: _x("driver firmware error", _SCRIPT, "ok"),
    38: _x("driver firmware error", _REPORT, "warn"),
    **dict.fromkeys((39, 40, 41), _x("copy engine exception", _RESTART, "warn")),
    43: _x("GPU stopped processing after a fault of the program; the GPU itself is healthy", _SCRIPT, "ok"),
    44: _x("graphics engine fault during a context switch", _REPORT, "warn"),
    45: _x("preemptive cleanup: the program ended or was ended", _OTHERS, "ok"),
    46: _x("GPU stopped processing", _RESET, "fail"),
    48: _x("double-bit (uncorrectable) ECC error", _RESET, "fail"),
    54: _x("auxiliary power is not connected to the GPU board", "Have the power cables of the GPU checked.", "fail"),
    62: _x("internal micro-controller halt", _RESET, "fail"),
    63: _x("a row of its memory was remapped, or a page retired, after ECC errors", _REPORT, "warn"),
    64: _x("a row of its memory could not be remapped, or a page not retired", _RESET, "fail"),
    **dict.fromkeys((66, 67), _x("illegal access by the driver", _REPORT, "warn")),
    68: _x("video decoder exception", _RESTART, "warn"),
    69: _x("graphics engine class error", _SCRIPT, "ok"),
    74: _x("NVLink error", _NVLINK, "fail"),
    79: _x("GPU has fallen off the bus", _REBOOT, "fail"),
    80: _x("corrupted data sent to the GPU", _SCRIPT, "warn"),
    92: _x("high rate of single-bit (corrected) ECC errors", _REPORT, "warn"),
    93: _x("wear limit of the InfoROM reached", _REPORT, "warn"),
    94: _x("contained memory error: only the program that met it is affected", _RESET, "fail"),
    95: _x("uncontained memory error: any program on the GPU may be affected", _RESET, "fail"),
    **dict.fromkeys((106, 107), _x("test message", _NOTHING, "ok")),
    109: _x("context switch timeout", _RESET, "fail"),
    110: _x("security fault", "Restart the node cold; if it comes back, report the GPU.", "fail"),
    119: _x("timeout of a call to the GPU's system processor (GSP)", _RESET, "fail"),
    120: _x("error of the GPU's system processor (GSP)", _RESET, "fail"),
    121: _x("corrected errors on the link to the Grace CPU (C2C)", _REPORT, "warn"),
    136: _x("NVLink training failed", _RESET, "fail"),
    137: _x("NVLink privilege error: mostly an illegal access to a peer's memory", _SCRIPT, "ok"),
    140: _x("unrecovered ECC error", _RESET, "fail"),
    141: _x("CUDA fast path error", _REPORT, "warn"),
    143: _x("GPU initialization error", _RESET, "fail"),
    **{
        number: _x(f"NVLink error ({unit})", _NVLINK, "fail")
        for number, unit in enumerate(("SAW", "RLW", "TLW", "TREX", "NVLPW_CTRL", "NETIR", "MSE"), 144)
    },
    151: _x("key rotation error", "Restart the virtual machine; if it comes back, report the GPU.", "fail"),
    154: _x(
        "the recovery that the GPU asks for has changed", "Look at the GPU Recovery Action in nvidia-smi -q.", "fail"
    ),
    155: _x("an NVLink was taken down by software", _RESET, "fail"),
    156: _x("a resource of the GPU was retired", _RESET, "warn"),
    157: _x("a resource of the GPU could not be retired", _REPORT, "fail"),
    158: _x("fatal timeout of the GPU", _RESET, "fail"),
    160: _x("a memory channel was retired", _REPORT, "warn"),
    161: _x("a memory channel could not be retired", _REPORT, "fail"),
    167: _x("fatal timeout on PCIe", _REBOOT, "fail"),
    169: _x("internal micro-controller halt", _RESET, "fail"),
    171: _x("uncorrectable error in its DRAM", _RESET, "fail"),
    172: _x("uncorrectable error in its SRAM", _RESET, "fail"),
}

_UNLISTED = XidMeaning(
    "not in gpuwatch's table",
    "Look it up in https://docs.nvidia.com/deploy/xid-errors/ and in the node's kernel log (NVRM: Xid).",
    "unknown",
)


def meaning_of(number: int) -> XidMeaning:
    """What an XID means. For one that is not in the table, where to look."""
    return XIDS.get(number, _UNLISTED)
