"""Signals before torchrun has its own handlers, and the one that it does not know."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class EarlySignal(Exception):
    """What torchrun's SignalException is, before torch is imported."""

    def __init__(self, message: str, sigval: signal.Signals) -> None:
        super().__init__(message)
        self.sigval = sigval


class TimeLimitNear(Exception):
    """SIGUSR2: the scheduler's warning that the time limit is near. torchrun ends its ranks by SIGTERM."""


def signal_exceptions(*more: type[BaseException]) -> tuple[type[BaseException], ...]:
    """What a signal raises, but SIGINT: torchrun's own exception comes first, as soon as it is there."""
    api = sys.modules.get("torch.distributed.elastic.multiprocessing.api")
    theirs = getattr(api, "SignalException", None)
    return (*((theirs,) if theirs is not None else ()), EarlySignal, *more)


class signals_raise:
    """SIGINT, SIGTERM, SIGHUP raise what torchrun's handlers raise, until those are there; SIGUSR2 does all the time.

    SIGINT is heard even where it was ignored when the launch began: a shell without job control, as in a script or a
    batch job, starts its background jobs like that, and torchrun hears it there, too, once its ranks run.

    What the launch has come to ignore at its end stays ignored: the interpreter takes a moment to leave, and srun, once
    the first node has left, kills those that do so. Their exit code would be the job's.
    """

    def __init__(self) -> None:
        self._holding = False
        self._held: list[signal.Signals] = []

    def __enter__(self) -> signals_raise:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
        self._before = {number: signal.signal(number, self._hear) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The first signal that comes in here is raised at the end, a second one at once."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._held:
            self._raise(self._held.pop())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._holding and not self._held:
            self._held.append(signal.Signals(number))
        else:
            self._raise(signal.Signals(number))

    @staticmethod
    def _raise(number: signal.Signals) -> None:
        if number is signal.SIGINT:
            raise KeyboardInterrupt
        if number is signal.SIGUSR2:
            signal.signal(number, signal.SIG_IGN)  # once is enough
            kind = type("TimeLimitNear", (TimeLimitNear, signal_exceptions()[0]), {})
            raise kind("gpuwatch launch got SIGUSR2: the time limit is near", signal.SIGTERM)
        raise signal_exceptions()[0](f"gpuwatch launch got {number.name}", number)
