"""The interface to a kind of device: streams, copies to the host, events.

CudaDevice is the real one. LateDevice is a fake on CPU memory for tests.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

StreamKey = tuple[int, int]
"""(index of the device, number of the stream on it)"""


class StatsDevice(Protocol):
    """What DeviceStatsBuffer needs of one kind of device. Only `wait` and `synchronize` wait for the device."""

    type: str
    """The `type` of the torch.device of its tensors."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""

    def stream_key(self, device: torch.device) -> StreamKey:
        """The current stream of a device."""

    def stream(self, device: torch.device) -> Any:
        """The current stream of a device as an object that keeps the stream alive."""

    def is_capturing(self) -> bool:
        """Whether the user captures a graph on the current stream. Nothing may be launched or queried then."""

    def use(self, key: StreamKey, stream: Any) -> AbstractContextManager[Any]:
        """Make the stream and its device current, to launch, allocate or record on it."""

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The tensor to use in place of these new rows on the device."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start a copy to the host on the current stream. The caller keeps both alive until an event after it."""

    def record(self, stream: Any) -> Any:
        """An event that is done when everything started on the stream so far is done."""

    def query(self, event: Any) -> bool:
        """Whether an event is done. Raises RuntimeError if the device has failed. Not to be called during a capture."""

    def wait(self, event: Any, timeout_s: float | None) -> bool:
        """Wait until an event is done; False after `timeout_s` seconds (None: no limit)."""

    def synchronize(self, stream: Any) -> None:
        """Wait for everything that was started on a stream."""

    def register(self, address: int, size: int, device: torch.device) -> str:
        """Allow copies directly into a range of host memory. Returns the reason if this is refused, else ""."""

    def unregister(self, address: int, device: torch.device) -> None:
        """Undo `register`."""

    def staging(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that can be copied into without waiting, whether `register` succeeded or not."""
