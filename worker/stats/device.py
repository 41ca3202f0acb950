"""Which kind of device holds a tensor of this process: CUDA, or the late device on the CPU that tests switch on."""

from __future__ import annotations

import functools
import os

import torch

from .cuda_device import CudaDevice
from .device_interface import Device

LATE_DEVICE = "GPUWATCH_LATE_DEVICE"
"""For tests: every CPU tensor is treated as a tensor of a LateDevice with this seed."""


@functools.cache
def late_device() -> Device | None:
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


def device_for(device: torch.device) -> Device:
    """The `Device` for tensors on `device`. Raises TypeError for an unknown kind."""
    if device.type == "cuda":
        return CudaDevice()
    if device.type != "cpu":
        raise TypeError(f"expected a tensor on CUDA or on the CPU, found {device.type}")
    return late_device() or _new_late_device(None)


def _new_late_device(seed: int | None) -> Device:
    from .late_device import LateDevice  # only tests pay for its import

    return LateDevice(seed)
