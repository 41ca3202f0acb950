"""Signals before torchrun has its own handlers, and the one that it does not know."""

from __future__ import annotations

import signal
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException


class TimeLimitNear(SignalException):
    """SIGUSR2: the scheduler's warning that the time limit is near. torchrun ends its ranks by SIGTERM."""

    def __init__(self) -> None:
        super().__init__("gpuwatch launch got SIGUSR2: the time limit is near", signal.SIGTERM)


class signals_raise:
    """SIGTERM and SIGHUP raise what torchrun's handlers raise, until it installs them; SIGUSR2 does all the time.

    What the launch has come to ignore at its end stays ignored: the interpreter takes a moment to leave, and srun, once
    the first node has left, kills those that do so. Their exit code would be the job's.
    """

    def __enter__(self) -> None:
        handlers = {signal.SIGTERM: self._raise, signal.SIGHUP: self._raise, signal.SIGUSR2: self._time_limit}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)

    @staticmethod
    def _raise(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"gpuwatch launch got {signal.Signals(number).name}", signal.Signals(number))

    @staticmethod
    def _time_limit(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough
        raise TimeLimitNear
