"""How long the GPU took, by its own clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_POLL_S = 0.0002
"""Between two looks at an event; the time that is told is the device's, so a late look costs no accuracy."""


class DeviceTimer:
    """Runs from when it is made, in the current stream."""

    def __init__(self) -> None:
        self._began = self._event()

    def seconds(self, deadline: float | None = None, late: Callable[[], Exception] = TimeoutError) -> float:
        """Until now; waits for the work that was started since, or raises `late()` at the deadline (monotonic)."""
        ended = self._event()
        if deadline is None:
            ended.synchronize()
        while not ended.query():  # type: ignore[no-untyped-call]  # torch has no annotations there
            if deadline is not None and time.monotonic() > deadline:
                raise late()
            time.sleep(_POLL_S)
        return float(self._began.elapsed_time(ended)) / 1e3

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no annotations there
        event.record()
        return event
