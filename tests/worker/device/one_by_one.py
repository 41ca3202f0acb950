"""A DeviceStatsBuffer whose tests read one tensor after the other."""

from __future__ import annotations

import torch
from gpuwatch.worker.device.device_buffer import DeviceStatsBuffer
from gpuwatch.worker.device.stream_buffer import DeviceRow


class OneByOne(DeviceStatsBuffer):
    """Each tensor is a frame of its own."""

    def measure(self, tensor: torch.Tensor, count: bool = False) -> int | None:
        """The index of the tensor's value, None if it cannot be measured."""
        return self.frame([tensor], [0], [], count)[0][0]

    def weight(
        self, tensor: torch.Tensor, count: bool = False, earlier: DeviceRow | None = None
    ) -> tuple[int | None, DeviceRow | None]:
        """(the index of the weight's value, the row to pass in the next time)."""
        (index,), (row,) = self.frame([tensor], [0], [earlier], count)
        return index, row
