"""One thread at a time writes into the recorder. Autograd has a thread per device, and each runs gradient hooks."""

from __future__ import annotations

import threading
from array import array


class RecorderLock:
    """A lock for the Python code that writes; the thread that holds it may take it again.

    The native writer takes no lock: it writes a frame without interruption, or notices another writer and gives up.
    While another thread holds this lock it gives up at once, and its caller then waits here. `cursor` is that of the
    RecorderWriter: the native writer finds the holder's thread there.
    """

    def __init__(self, cursor: array[int]) -> None:
        self._lock = threading.RLock()
        self._cursor = cursor
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        self._cursor[1] = threading.get_ident()

    def comes_free(self, seconds: float) -> bool:
        """Whether this thread could have it within so long."""
        if not self._lock.acquire(timeout=seconds):
            return False
        self._lock.release()
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._cursor[1] = 0
        self._lock.release()
