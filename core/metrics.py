"""Every figure that a node's telemetry may have: what it is, its unit, and what it is called in a sentence.

A `level` is a reading at one moment, such as a temperature. A `count` only grows, such as bytes sent, and is shown as
its growth per second. So thinning a record loses no count.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

HOST = ""
"""What a series of the host itself is of. Others are of a GPU's UUID, `rank 3`, `mlx5_0/1` or `runs-dir`."""


class NodeMetric(NamedTuple):
    """One figure."""

    kind: Literal["level", "count"]
    unit: str
    """A count's is the unit of its growth per second; "" counts things."""
    text: str


METRICS: dict[str, NodeMetric] = {
    # the host
    "cpu": NodeMetric("count", "share", "processor in use"),
    "steal": NodeMetric("count", "share", "processor stolen by other virtual machines"),
    "iowait": NodeMetric("count", "share", "processor idle while it waits for a disk"),
    "memory_used": NodeMetric("level", "bytes", "memory in use"),
    "memory_total": NodeMetric("level", "bytes", "memory"),
    "swap_used": NodeMetric("level", "bytes", "swap in use"),
    "swap_in": NodeMetric("count", "bytes/s", "read from swap"),
    "swap_out": NodeMetric("count", "bytes/s", "written to swap"),
    "net_received": NodeMetric("count", "bytes/s", "received over the network"),
    "net_sent": NodeMetric("count", "bytes/s", "sent over the network"),
    "net_errors": NodeMetric("count", "", "errors of the network interfaces"),
    # the memory cgroup of the job
    "job_memory_used": NodeMetric("level", "bytes", "memory of the job's cgroup in use"),
    "job_memory_limit": NodeMetric("level", "bytes", "memory that the job's cgroup may use"),
    "job_cpu_held": NodeMetric("count", "share", "time in which the job's cgroup was held back by its processor limit"),
    # a port of InfiniBand
    "ib_received": NodeMetric("count", "bytes/s", "received over InfiniBand"),
    "ib_sent": NodeMetric("count", "bytes/s", "sent over InfiniBand"),
    "ib_errors": NodeMetric("count", "", "errors of the InfiniBand port"),
    # a folder's disk
    "disk_free": NodeMetric("level", "bytes", "free on the disk"),
    "disk_size": NodeMetric("level", "bytes", "size of the disk"),
    # a rank
    "rss": NodeMetric("level", "bytes", "resident memory"),
    "rank_cpu": NodeMetric("count", "cores", "processor used"),
    "open_files": NodeMetric("level", "", "open files"),
    "open_files_limit": NodeMetric("level", "", "files that it may open"),
    # a GPU
    "gpu_use": NodeMetric("level", "share", "GPU in use"),
    "gpu_memory_used": NodeMetric("level", "bytes", "GPU memory in use"),
    "gpu_memory_total": NodeMetric("level", "bytes", "GPU memory"),
    "sm_clock": NodeMetric("level", "MHz", "SM clock"),
    "sm_clock_max": NodeMetric("level", "MHz", "highest SM clock"),
    "power": NodeMetric("level", "W", "power"),
    "temperature": NodeMetric("level", "C", "temperature"),
    "clocks_hw_slowdown": NodeMetric("count", "share", "the hardware holds its clocks at half or less"),
    "clocks_sw_thermal": NodeMetric("count", "share", "the driver holds its clocks down because it is hot"),
    "clocks_hw_thermal": NodeMetric("count", "share", "the hardware holds its clocks down because it is hot"),
    "clocks_hw_power_brake": NodeMetric("count", "share", "the power supply holds its clocks down"),
    "clocks_sw_power_cap": NodeMetric(
        "count", "share", "its power limit holds its clocks down, as is usual at full load"
    ),
    "ecc_corrected": NodeMetric("count", "", "corrected ECC errors"),
    "ecc_uncorrected": NodeMetric("count", "", "uncorrectable ECC errors"),
    "nvlink_received": NodeMetric("count", "bytes/s", "received over NVLink"),
    "nvlink_sent": NodeMetric("count", "bytes/s", "sent over NVLink"),
    "pcie_received": NodeMetric("count", "bytes/s", "received over PCIe"),
    "pcie_sent": NodeMetric("count", "bytes/s", "sent over PCIe"),
    "pcie_replays": NodeMetric("count", "", "PCIe replays"),
    "pcie_generation": NodeMetric("level", "", "PCIe generation of its link"),
    "pcie_width": NodeMetric("level", "", "PCIe lanes of its link"),
}


def is_count(what: str) -> bool:
    """Whether a figure only grows. One that a later version has is taken for a level."""
    return what in METRICS and METRICS[what].kind == "count"
