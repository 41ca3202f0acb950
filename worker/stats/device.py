"""The seam to a kind of device: streams, copies to the host, events.

CudaDevice is the real one, LateDevice a twin on CPU memory for tests.
"""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

LATE_DEVICE = "GPUWATCH_LATE_DEVICE"
"""For tests: every CPU tensor is treated as a tensor of a LateDevice with this seed."""

StreamKey = tuple[int, int]
"""(index of the device, number of the stream on it)"""


class Device(Protocol):
    """What DeviceStatsBuffer needs of one kind of device. Nothing waits for the device but `wait` and `synchronize`."""

    type: str
    """Of torch.device: the kind of tensors that it reads."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""

    def stream_key(self, device: torch.device) -> StreamKey:
        """The current stream of a device."""

    def stream(self, device: torch.device) -> Any:
        """The same as an object that keeps the stream usable."""

    def is_capturing(self) -> bool:
        """Whether the user captures a graph on the current stream: nothing may be launched or asked for then."""

    def use(self, key: StreamKey, stream: Any) -> AbstractContextManager[Any]:
        """Make the stream and its device current, for what we launch, allocate or record."""

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Take new rows on the device into use; returns the tensor to use in their place."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start a copy to the host on the current stream. The caller keeps both alive until an event after it."""

    def record(self, stream: Any) -> Any:
        """An event that comes when all that was started on the stream so far is done."""

    def query(self, event: Any) -> bool:
        """Whether an event has come. RuntimeError: the device has failed. Not while a graph is captured."""

    def wait(self, event: Any, timeout_s: float | None) -> bool:
        """Wait for an event; False when the time is over (None: no limit)."""

    def synchronize(self, stream: Any) -> None:
        """Wait for all that was started on a stream."""

    def register(self, address: int, size: int, device: torch.device) -> str:
        """Let copies go straight into host memory. Returns why they cannot, "" when they can."""

    def unregister(self, address: int, device: torch.device) -> None:
        """Undo `register`."""

    def staging(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies can go into without waiting, whatever `register` said."""


@functools.cache
def late_device() -> Device | None:
    """The LateDevice that stands in for the CPU in this process; None outside of tests. Raises ValueError."""
    seed = os.environ.get(LATE_DEVICE, "")
    if not seed:
        return None
    from .late_device import LateDevice

    if not seed.isdecimal():
        raise ValueError(f"expected a whole number as the seed in {LATE_DEVICE}, found {seed!r}")
    return LateDevice(int(seed))


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor come later, from a device, and are not in host memory."""
    return not tensor.is_cpu or late_device() is not None


def has_reader(device: torch.device) -> bool:
    """Whether tensors there can be read without waiting."""
    return device.type == "cuda" or (device.type == "cpu" and late_device() is not None)


def device_for(device: torch.device) -> Device:
    """The kind of device that a tensor is on. Raises TypeError for one that is not known."""
    if device.type == "cuda":
        from .cuda_device import CudaDevice

        return CudaDevice()
    if device.type != "cpu":
        raise TypeError(f"expected a tensor on CUDA or on the CPU, found {device.type}")
    late = late_device()
    if late is not None:
        return late
    from .late_device import LateDevice

    return LateDevice()
