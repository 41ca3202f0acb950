"""Measures durations by the GPU's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_POLL_S = 0.0002
"""Time between two queries of an event. The device measures the duration, so a late query costs no accuracy."""


class DeviceTimer:
    """A timer in the current stream. It starts when it is made."""

    def __init__(self) -> None:
        self._began = self._event()

    def seconds(self, deadline: float | None = None, late: Callable[[], Exception] = TimeoutError) -> float:
        """The duration of the work started since then. Waits for it, or raises `late()` at the monotonic deadline."""
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
