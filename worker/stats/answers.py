"""A few numbers that lie on a device, brought to the host without waiting: a GradScaler's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .device import Device, device_for

MOST = 3


class Answer:
    """Up to three numbers on their way."""

    __slots__ = ("_count", "_driver", "_event", "_host", "_source")

    def __init__(self, driver: Device, source: torch.Tensor, host: torch.Tensor, event: Any, count: int) -> None:
        self._driver = driver
        self._source = source  # kept until its copy has been carried out
        self._host = host
        self._event = event
        self._count = count

    def has_come(self) -> bool:
        """Whether `numbers` may be read. Does not wait; False while the user captures a graph."""
        return not self._driver.is_capturing() and self._driver.query(self._event)

    def numbers(self) -> list[float]:
        """The numbers, in the order in which they were asked for."""
        return [float(number) for number in self._host.view(torch.float64).reshape(-1)[: self._count].tolist()]


def ask(numbers: Sequence[torch.Tensor]) -> Answer | None:
    """Have one to three scalars on one device brought to the host. None while the user captures a graph.

    To be called with gradients off and out of sight of the script's modes. Raises ValueError for more than three.
    """
    if not 0 < len(numbers) <= MOST:
        raise ValueError(f"expected one to {MOST} numbers, found {len(numbers)}")
    device = numbers[0].device
    driver = device_for(device)
    if driver.is_capturing():
        return None
    key, stream = driver.stream_key(device), driver.stream(device)
    with torch.inference_mode(False), driver.use(key, stream):
        scalars = [number.detach().reshape(()).to(device, torch.float64) for number in numbers]
        scalars += [scalars[0]] * (MOST - len(scalars))
        source = driver.rows(torch.stack(scalars).view(torch.int64).reshape(1, MOST))
        host = driver.staging(1)
        driver.copy(source, host)
        return Answer(driver, source, host, driver.record(stream), len(numbers))
