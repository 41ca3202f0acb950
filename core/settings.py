"""What `gpuwatch launch` tells its workers: one JSON value in one environment variable."""

from __future__ import annotations

import json
import os
import re
from typing import Literal

import msgspec

from .any_text import given_back, to_json

_NOT_ASCII = re.compile("[^\x00-\x7f]")
VARIABLE = "GPUWATCH_WORKER"
"""The worker removes it from its environment, so that the script's own child processes do not act as workers."""

OnOverflow = Literal["abort", "continue"]
Watched = Literal["forward", "grads", "weights", "comms"]
OnHang = Literal["report", "auto", "abort"]
OnPreflightFailure = Literal["stop", "continue"]
PreflightMode = Literal["full", "quick", "off"]


class WorkerSettings(msgspec.Struct, frozen=True):
    """How a worker behaves. Batches are 0-indexed; times are seconds."""

    recorder_dir: str
    round: str = "0"
    """Names this rendezvous. It is the same on every node and changes with every restart."""
    attempt: int = 0
    on_overflow: OnOverflow = "abort"
    trace_batches: list[int] = []
    abort_after_batch: int | None = None
    preflight: PreflightMode = "quick"
    preflight_timeout_s: float = 300.0
    """Deadline for the arrival of all ranks. No later stage gets more than this."""
    on_preflight_failure: OnPreflightFailure = "stop"
    watch: tuple[Watched, ...] = ("forward", "grads", "weights", "comms")
    modules: list[str] = []
    """Shell patterns of the modules that get frames. Without a pattern, all do."""
    every: int = 1
    """One batch in this many is watched; the others are skipped."""
    sync: bool = False
    """Read and raise in the failing module's own hook."""
    guard_optimizer: bool = False
    """Read the gradients before each optimizer step, and stop before a non-finite one is used."""
    ignore: list[str] = []
    """Shell patterns, `MODULE` or `MODULE:ROLE`, of rows that are waived: they raise no alarm."""
    near_overflow: float = 1.0
    """A value is near overflow if it is at most this many powers of two below the dtype's largest number."""
    underflow_share: float = 0.1
    """A tensor of low precision is in underflow if at least this share of its elements is subnormal."""
    scaler_skips: int = 12
    """A GradScaler may skip this many optimizer steps in a row before that is an alarm."""
    state_every: int = 50
    """After one optimizer step in this many, the optimizer's states in 16 bits or less are read; 0: never."""
    measure_cost: bool = False
    """Skip every second batch, to compare the time of watched and skipped batches."""
    alloc: str = ""
    """What the preflight allocates: a share of the free memory (`80%`) or a size (`256MiB`); "": the mode's default."""
    bandwidth_size: int = 0
    """Largest size of the bandwidth test in bytes. 0 is the device's default: 256 MiB on CUDA, 16 MiB on the CPU."""
    min_busbw: float = 0.0
    """The preflight fails below this bus bandwidth (GB/s, at the largest size); 0: it never does."""
    slow_factor: float = 1.5
    """A device is slow if it takes this many times the median of all devices."""
    nccl_debug: str = ""
    """Folder for the probe's NCCL logs, one file per rank; "" writes none."""
    health_thresholds: str = ""
    """File whose thresholds of the GPUs' health replace the built-in ones; "" is none."""
    check_only: bool = False
    """End after the preflight: there is no script."""
    node_hosts: list[str] = []
    """The hosts of all nodes by node rank, as the launches have told each other; [] if unknown."""
    meets_at: str = ""
    """HOST:PORT at which ranks of several hosts meet for the preflight under `gpuwatch run`; "" if all are of one."""

    def to_json(self) -> str:
        """The value of the environment variable: ASCII, as a locale may have nothing else."""
        return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], to_json(self).decode())

    @classmethod
    def from_json(cls, data: bytes) -> WorkerSettings:
        """What `to_json` has made."""
        settings = msgspec.json.decode(data, type=cls)
        return given_back(settings, msgspec.json.encode(settings), cls)

    @classmethod
    def from_environment(cls) -> WorkerSettings | None:
        """Take the settings out of the environment; None when the process was not started by a launch."""
        value = os.environ.pop(VARIABLE, None)
        return cls.from_json(value.encode()) if value is not None else None
