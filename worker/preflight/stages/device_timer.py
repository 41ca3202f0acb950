"""How long the GPU took, by its own clock."""

from __future__ import annotations

import torch


class DeviceTimer:
    """Runs from when it is made, in the current stream."""

    def __init__(self) -> None:
        self._began = self._event()

    def seconds(self) -> float:
        """Until now; waits for the work that was started since."""
        ended = self._event()
        ended.synchronize()
        return float(self._began.elapsed_time(ended)) / 1e3

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no annotations there
        event.record()
        return event
