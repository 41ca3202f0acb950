"""Threads that are started where memory may be short, and helpers on which nobody may have to wait for ever."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from ..signal_errors import from_outside

BEGINS_S = 10.0
"""A thread that has not begun after this long never will."""

SECOND_RUN = "gpuwatch second run"
"""The name of the thread in which the forward of an alarm runs again."""

T = TypeVar("T")


def start_thread(run: Callable[[], object], begins_s: float = BEGINS_S) -> bool:
    """Run something in a thread that the process does not wait for at its end. False if it will never run.

    `threading.Thread.start` waits until its thread has begun. One that finds no memory for its first frame ends before
    that, and its starter waits for ever.
    """
    lock, begun = threading.Lock(), threading.Event()
    given_up = False

    def first() -> None:
        with lock:
            if given_up:
                return
            begun.set()
        run()

    try:
        _thread.start_new_thread(first, ())
    except (RuntimeError, MemoryError) as error:  # a limit on threads
        if from_outside(error):
            raise
        return False
    if begun.wait(begins_s):
        return True
    with lock:
        given_up = not begun.is_set()
        return not given_up


def begin(thread: threading.Thread) -> None:
    """Start a thread, and raise what a signal's handler raises meanwhile.

    `threading.Thread.start` takes any exception for a thread that could not be made, and forgets it. It raises KeyError
    where the thread has begun by then.
    """
    interrupted: BaseException | None = None
    try:
        thread.start()
    except KeyError as error:
        if from_outside(error) or error.__context__ is None:
            raise
        interrupted = error.__context__
    if interrupted is not None:
        raise interrupted


class OneThread:
    """Does one thing after another in a thread of its own; where there can be none, in the caller's."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] | None = None

    def submit(self, do: Callable[[], T]) -> Future[T]:
        """Its result, or what it has raised, is in the future."""
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(do())
            except BaseException as error:
                done.set_exception(error)

        if self._work is None:
            self._work = SimpleQueue()
            if not start_thread(self._run, BEGINS_S):
                self._work = None
        if self._work is None:
            work()
        else:
            self._work.put(work)
        return done

    def _run(self) -> None:
        work = self._work
        assert work is not None
        while (do := work.get()) is not None:
            do()

    def close(self) -> None:
        """The thread ends after what it has been given."""
        if self._work is not None:
            self._work.put(None)
            self._work = None
