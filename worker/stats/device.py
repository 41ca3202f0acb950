"""Which kind of device holds a tensor of this process: CUDA, or the late device on the CPU that tests switch on."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import psutil
import torch

from .cuda_device import CudaDevice
from .device_interface import StatsDevice
from .without_modes import without_modes

LATE_DEVICE = "GPUWATCH_LATE_DEVICE"
"""For tests: every CPU tensor is treated as a tensor of a LateDevice with this seed."""


@functools.cache
def late_device() -> StatsDevice | None:
    """The LateDevice that replaces the CPU in this process; None outside of tests. Raises ValueError."""
    seed = os.environ.get(LATE_DEVICE, "")
    if not seed:
        return None
    if not seed.isdecimal():
        raise ValueError(f"expected a whole number as the seed in {LATE_DEVICE}, found {seed!r}")
    return _new_late_device(int(seed))


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor arrive later, from a device."""
    return not tensor.is_cpu or late_device() is not None


def has_reader(device: torch.device) -> bool:
    """Whether tensors on `device` can be read without waiting."""
    return device.type == "cuda" or (device.type == "cpu" and late_device() is not None)


def device_for(device: torch.device) -> StatsDevice:
    """The `StatsDevice` for tensors on `device`. Raises TypeError for an unknown kind."""
    if device.type == "cuda":
        return CudaDevice()
    if device.type != "cpu":
        raise TypeError(f"expected a tensor on CUDA or on the CPU, found {device.type}")
    return late_device() or _new_late_device(None)


def _new_late_device(seed: int | None) -> StatsDevice:
    from .late_device import LateDevice  # only tests pay for its import

    return LateDevice(seed)


# Copies a few numbers of a device to the host without waiting: for a caller that needs a value of the device.


class ToHost:
    """An asynchronous copy of a tensor's numbers to the host. See `to_host`."""

    def __init__(self, tensor: torch.Tensor, driver: StatsDevice | None) -> None:
        self._driver = driver
        self._source = tensor
        """Kept until the copy has arrived."""
        self._numbers = tensor
        self._event: Any = None
        if driver is not None:
            self._key, self._stream = driver.stream_key(tensor.device), driver.stream(tensor.device)
            with driver.use(self._key, self._stream):
                self._numbers = driver.staging(*tensor.shape, dtype=tensor.dtype)
                driver.copy(tensor, self._numbers)
                self._event = driver.record(self._stream)

    def arrived(self) -> bool:
        """Whether the numbers have arrived. Never waits. False while the user captures a graph."""
        if self._driver is None or self._event is None:
            return True
        if self._driver.is_capturing():
            return False
        with self._driver.use(self._key, self._stream):
            arrived = self._driver.query(self._event)
        if arrived:
            self._event = None
            self._source = self._numbers
        return arrived

    @property
    def numbers(self) -> list[float]:
        """The elements of the tensor. Call it only after `arrived` has returned True."""
        assert self._event is None
        return [float(number) for number in self._numbers.reshape(-1).tolist()]


def to_host(*scalars: torch.Tensor) -> ToHost | None:
    """Start to copy the numbers of these one-element tensors, all on one device. None while a graph is captured.

    Numbers in host memory have arrived at once.
    """
    return without_modes(_to_host, scalars)


def _to_host(scalars: tuple[torch.Tensor, ...]) -> ToHost | None:
    if not any(is_on_device(scalar) for scalar in scalars):
        return ToHost(torch.stack([scalar.reshape(()).double() for scalar in scalars]), None)
    driver = device_for(scalars[0].device)
    if driver.is_capturing():
        return None
    with torch.inference_mode(False):
        numbers = torch.stack([scalar.detach().reshape(()).float() for scalar in scalars])
    return ToHost(driver.rows(numbers), driver)


# The type of the file system that a file is on. A GPU driver can register tmpfs memory, but not every disk file.


def file_system_of(path: Path) -> str:
    """The type as `mount -t` names it; "an unknown file system" if it cannot be found."""
    try:
        path = path.resolve()
        mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
        return str(max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype)  # the last one is on top
    except (OSError, ValueError):
        return "an unknown file system"
