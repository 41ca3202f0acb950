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


class AwaitedThread:
    """A thread that the main thread waits for while signals' handlers raise. The process does not wait for it.

    CPython's own `start` takes what a handler raises for a thread that could not be made: the thread then prints a
    KeyError. Its own `join` takes a thread that runs for one that has ended (3.12 and earlier, _wait_for_tstate_lock).
    And when a Thread is freed, a callback in Python runs (threading._dangling): what a handler raises there is lost. So
    only another thread has it.
    """

    def __init__(self, run: Callable[[], object], name: str) -> None:
        self._work, self._name = run, name
        self._running = _thread.allocate_lock()
        self._running.acquire()
        self._has_ended, self._is_given_up = True, False
        self.refused: RuntimeError | None = None
        """A limit on threads: it has ended, and nothing was done."""

    def begin(self) -> None:
        """Start it, and do not wait until it has begun."""
        try:
            self._has_ended = False  # no call lies between this and the next line, so no handler runs there
            _thread.start_new_thread(self._start, ())
        except RuntimeError as error:
            if from_outside(error):
                raise
            self._refuse(error)

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError as error:
            if from_outside(error):
                raise
            self._refuse(error)

    def _refuse(self, error: RuntimeError) -> None:
        self.refused = error
        self._end()

    def _run(self) -> None:
        try:
            if not self._is_given_up:
                self._work()
        finally:
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._running.release()

    def give_up(self) -> None:
        """If it has not begun, it does nothing from now on."""
        self._is_given_up = True

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended, or ends within so many seconds. True if it was never begun."""
        if not self._has_ended:  # a handler may have raised here before, with the lock taken
            self._running.acquire(timeout=seconds)
        return self._has_ended


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
