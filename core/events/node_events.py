"""What is told of a node and its GPUs, and of no rank."""

from __future__ import annotations

import msgspec


class NodeSignal(msgspec.Struct, frozen=True, tag="node_signal"):
    """`gpuwatch launch` ended because of a signal."""

    signal: int
    time_ns: int = 0
    reason: str = ""
    """Why the scheduler ends the job, if it gives a reason: `SLURM: the job has reached its time limit`."""
    down_nodes: list[str] = []
    """Nodes of the job that the scheduler has lost."""
    told_by: str = ""
    """The scheduler's command that reported it: `sinfo`."""


class AttemptNodes(msgspec.Struct, frozen=True, tag="attempt_nodes"):
    """All nodes of an attempt, as their launches have told each other in torchrun's store: of two and more."""

    attempt: int
    name: str
    """Drawn anew for each attempt, and the same on all its nodes: no other job has it."""
    hosts: list[str]
    """By node rank."""


class GpuXid(msgspec.Struct, frozen=True, tag="xid"):
    """The driver reported an XID of a GPU. NVML has no history, so these are only the XIDs since the run began."""

    device: str
    """UUID of the whole GPU."""
    number: int
    time_ns: int = 0
    meaning: str = ""
    next: str = ""
    grade: str = "unknown"
    """What it says of the GPU: ok (the script's own fault), warn, fail, unknown."""
    mig: str = ""
    """`GPU instance/compute instance`, where the XID is about one."""


class GpuCounters(msgspec.Struct, frozen=True, tag="gpu_counters"):
    """The error counters of one GPU. The difference between two readings is what the run added (core/gpu)."""

    device: str
    """UUID of the whole GPU."""
    moment: str
    """`before` the training, after an `anomaly`, or at the `end`."""
    counters: dict[str, int]
    unknown: dict[str, str] = {}
    """Counter -> why it could not be read."""
    time_ns: int = 0
    mig: list[str] = []
    """UUIDs of the MIG devices on it. A rank may know its GPU by one of them."""


class GpuHealth(msgspec.Struct, frozen=True, tag="gpu_health"):
    """Whether NVML watches the node's GPUs. Sent when that begins, and once more if it ends too early."""

    grade: str
    """`ok`, or `unknown` with the reason in `detail`."""
    detail: str = ""
    driver: str = ""
    devices: dict[str, str] = {}
    """UUID -> name"""
    unwatched: dict[str, str] = {}
    """UUID -> why its XIDs could not be registered"""
    time_ns: int = 0


NodeEvent = NodeSignal | AttemptNodes | GpuXid | GpuCounters | GpuHealth
