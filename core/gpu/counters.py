"""What a run has done to the counters of a GPU: the difference between two readings of `GpuCounters`. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import msgspec
import psutil

from ..events import GpuCounters, GpuHealth, GpuXid
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
        if "fail" in grades:
            return "fail"
        if "warn" in grades:
            return "warn"
        return "ok" if self.known else "unknown"


def difference(before: GpuCounters, after: GpuCounters) -> list[CounterChange]:
    """Counters that have changed, the worst first."""
    seconds = max((after.time_ns - before.time_ns) / 1e9, 1e-9)
    changes = []
    for name, (words, grade) in _WORDS.items():
        first, last = before.counters.get(name, 0 if name == "lost" else None), after.counters.get(name)
        if first is None or last is None or first == last:
            continue
        if last < first:
            changes.append(CounterChange(name, first, last, "ok", f"{words}: {first} -> {last}, counted anew"))
            continue
        sentence = f"{words}: {first} -> {last}"
        if name in RATES:
            limits, over_s, _ = RATES[name]
            rate = (last - first) / max(seconds / over_s, 1.0)
            if limits.warn is not None and rate >= limits.warn:
                grade = "warn"
                sentence += f", {rate:.0f} in {over_s:.0f} s"
        changes.append(CounterChange(name, first, last, grade, sentence))
    order: tuple[Grade, ...] = ("fail", "warn", "unknown", "ok")
    return sorted(changes, key=lambda change: order.index(change.grade))


def since_preflight(events: Iterable[GpuXid | GpuCounters | GpuHealth], device: str) -> GpuSincePreflight:
    """What happened to a GPU since the training began. `device` is what its rank calls it: the UUID of the GPU or of
    a MIG device on it, with or without `GPU-`."""
    events = list(events)
    readings = [event for event in events if isinstance(event, GpuCounters) and _is(event, device)]
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


def _is(reading: GpuCounters, device: str) -> bool:
    return _bare(device) in map(_bare, (reading.device, *reading.mig))


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


# Which processes belong to this job: those that torchrun started on this host with the same rendezvous.

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
