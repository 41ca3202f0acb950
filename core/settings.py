"""What `gpuwatch launch` tells its workers: one JSON value in one environment variable."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

VARIABLE = "GPUWATCH_WORKER"
"""Removed from the environment by the worker, so that what the script starts does not take itself for one."""

OnOverflow = Literal["abort", "continue"]
Watched = Literal["forward", "grads", "weights"]
OnPreflightFailure = Literal["stop", "continue"]
PreflightMode = Literal["full", "quick", "off"]


class WorkerSettings(msgspec.Struct, frozen=True):
    """How a worker behaves. Batches are 0-indexed; times are seconds."""

    recorder_dir: str
    round: str = "0"
    """Names this rendezvous: the same on every node, another after every restart."""
    attempt: int = 0
    on_overflow: OnOverflow = "abort"
    max_frames: int = 21
    trace_batches: list[int] = []
    abort_after_batch: int | None = None
    preflight: PreflightMode = "quick"
    preflight_timeout_s: float = 300.0
    """For the arrival of all ranks; no other stage gets more than its own figure or this."""
    on_preflight_failure: OnPreflightFailure = "stop"
    watch: tuple[Watched, ...] = ("forward", "grads", "weights")
    modules: list[str] = []
    """Shell patterns of the modules that get frames; none: all."""
    every: int = 1
    """One batch of so many is watched."""
    sync: bool = False
    """Look, and raise, in the failing module's own hook."""
    guard_optimizer: bool = False
    """Look at the gradients before each optimizer step, and do not let a non-finite one in."""
    ignore: list[str] = []
    """Shell patterns, `MODULE` or `MODULE:ROLE`, of rows that are no alarm."""
    near_overflow: float = 1.0
    """Powers of two below the dtype's largest number, from which on a value is near overflow."""
    underflow_share: float = 0.1
    """Share of subnormal elements in a tensor of low precision, from which on it is in underflow."""
    scaler_skips: int = 12
    """Optimizer steps that a GradScaler may skip in a row before that is an alarm."""
    measure_cost: bool = False
    """Leave out every second batch, to compare."""
    alloc: str = ""
    """What the preflight allocates: a share of what is free (`80%`) or a size (`256MiB`); "" is the mode's own."""
    bandwidth_size: int = 0
    """Largest size of the bandwidth test in bytes; 0 is the device's own: 256 MiB on CUDA, 16 MiB on the CPU."""
    min_busbw: float = 0.0
    """GB/s of bus bandwidth at the largest size, below which the preflight fails; 0: never."""
    slow_factor: float = 1.5
    """Times the median of all, from which on a device is slow."""
    nccl_debug: str = ""
    """Folder for the probe's NCCL logs, one file per rank; "" writes none."""
    health_thresholds: str = ""
    """File with thresholds of the device health in place of the built-in ones; "" is none."""
    check_only: bool = False
    """End after the preflight: there is no script."""
    node_hosts: list[str] = []
    """The hosts of all nodes in their order, as the launches have told each other; [] if they have not."""

    def to_json(self) -> str:
        """The value of the environment variable."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_environment(cls) -> WorkerSettings | None:
        """Take the settings out of the environment; None when the process was not started by a launch."""
        value = os.environ.pop(VARIABLE, None)
        return msgspec.json.decode(value, type=cls) if value is not None else None
