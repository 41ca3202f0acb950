"""Copies a few numbers of a device to the host without waiting: for a caller that needs a value of the device."""

from __future__ import annotations

from typing import Any

import torch

from ..without_modes import without_modes
from .device import device_for, is_on_device
from .device_interface import Device


class ToHost:
    """An asynchronous copy of a tensor's numbers to the host. See `to_host`."""

    def __init__(self, tensor: torch.Tensor, driver: Device | None) -> None:
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
