"""Signals before torchrun has its own handlers, and after the launch has its answer."""

from __future__ import annotations

import signal
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException


class signals_raise:
    """Until torchrun installs its own handlers, SIGTERM and SIGHUP raise what torchrun's handlers raise.

    What the launch has come to ignore at its end stays ignored: the interpreter takes a moment to leave, and who is
    killed then loses the exit code.
    """

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._raise) for number in (signal.SIGTERM, signal.SIGHUP)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)

    @staticmethod
    def _raise(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"gpuwatch launch got {signal.Signals(number).name}", signal.Signals(number))
