"""Signals before torchrun has its own handlers."""

from __future__ import annotations

import signal
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException


class signals_raise:
    """Until torchrun installs its own handlers, SIGTERM and SIGHUP raise what torchrun's handlers raise."""

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._raise) for number in (signal.SIGTERM, signal.SIGHUP)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @staticmethod
    def _raise(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"gpuwatch launch got {signal.Signals(number).name}", signal.Signals(number))
