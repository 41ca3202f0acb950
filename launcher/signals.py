"""A torchrun that does not hear: signals before it has its own handlers, and a rendezvous that never answers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil


class EarlySignal(Exception):
    """What torchrun's SignalException is, before torch is imported."""

    def __init__(self, message: str, sigval: signal.Signals) -> None:
        super().__init__(message)
        self.sigval = sigval


PATIENCE_S = 5.0
"""For Python to hear a signal."""


class TimeLimitNear(Exception):
    """SIGUSR2: the scheduler's warning that the time limit is near. torchrun ends its ranks by SIGTERM."""


def signal_exceptions(*more: type[BaseException]) -> tuple[type[BaseException], ...]:
    """What a signal raises, but SIGINT: torchrun's own exception comes first, as soon as it is there."""
    api = sys.modules.get("torch.distributed.elastic.multiprocessing.api")
    theirs = getattr(api, "SignalException", EarlySignal)
    return (theirs, EarlySignal, *more)


class signals_raise:
    """SIGINT, SIGTERM, SIGHUP raise what torchrun's handlers raise, until those are there; SIGUSR2 does all the time.

    SIGINT is heard even where it was ignored when the launch began: a shell without job control, as in a script or a
    batch job, starts its background jobs like that, and torchrun hears it there, too, once its ranks run.

    Signals that the launch ignores at its end stay ignored. The interpreter takes a moment to exit, and once the first
    node has exited, srun kills the launches that are still exiting; their exit code would be the job's.

    Python hears nothing while the main thread is in C. torch asks there for the address of the rendezvous's host, and
    an answer of DNS can take minutes. If the first signal is not heard for so long, `unheard` is called with it, in a
    thread of its own.
    """

    def __init__(self) -> None:
        self._holding = False
        self._held: list[signal.Signals] = []
        self._heard = threading.Event()
        self.unheard: Callable[[signal.Signals], object] = lambda number: None

    def __enter__(self) -> signals_raise:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
        reads, self._writes = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writes, False)
        self._woken_before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._hear) for number in numbers}
        threading.Thread(target=self._watch, args=(reads,), daemon=True, name="gpuwatch-signals").start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._woken_before)
        os.close(self._writes)
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

    def _watch(self, reads: int) -> None:
        """What C has heard, byte by byte, to the first that is ours, or the end."""
        with os.fdopen(reads, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if signal.getsignal(number[0]) == self._hear:  # else torchrun has its own: its ranks run
                    if not self._heard.wait(PATIENCE_S):
                        self.unheard(signal.Signals(number[0]))
                    break

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard.set()
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


# A torchrun that cannot see that its ranks have ended, as its rendezvous store is out of reach.
#
# torchrun's agent asks the store before each look at its ranks. If the store's host does not answer, it waits as long
# as TCP goes on trying, a quarter of an hour and more, and no signal ends that wait. A node that was cut off would stay
# up, with nothing running on it. (torch 2.5 to 2.13, c10d rendezvous)

STUCK_S = 60.0
_LOOK_S = 1.0


def watch_torchrun(
    unseen: Callable[[], Collection[psutil.Process]], leave: Callable[[], None], patience_s: float
) -> None:
    """Start a thread that calls `leave` once all of `unseen` have been ended for `patience_s`, unreported by torchrun.

    `unseen` gives the ranks of this node whose end torchrun has not reported yet.
    """

    def watch() -> None:
        looks = 0
        while looks * _LOOK_S < patience_s:
            pause.wait(_LOOK_S)
            looks = looks + 1 if (ranks := unseen()) and all(map(_has_ended, ranks)) else 0
        leave()

    pause = threading.Event()
    threading.Thread(target=watch, daemon=True, name="gpuwatch-stuck").start()


def _has_ended(process: psutil.Process) -> bool:
    """A child that nobody has waited for yet is a zombie."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True
