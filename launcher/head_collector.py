"""The collector as the head node's launch has it: a child that is started again, on the same port with its store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
from msgspec.structs import replace

from ..core.wire.pipe import (
    Bound,
    CannotBind,
    CollectorConfig,
    FromCollector,
    Notice,
    PreflightOver,
    StageLine,
    read_from_collector,
)
from .children import Child, Lives

_FIRST_WORD_S = 30.0
_TRIES = 3
"""Of one that ends before its first word; one that says nothing is not tried again."""


class HeadCollector:
    """Starts it. `say` is given sentences for the user, `show` what it tells while the preflight runs."""

    def __init__(
        self,
        config: CollectorConfig,
        say: Callable[[str], object],
        show: Callable[[StageLine | PreflightOver], object],
    ) -> None:
        self._config = config
        self._say = say
        self._show = show
        self._ending = threading.Event()
        self.told_all = threading.Event()
        """It has said the last line about the preflight, or says no more."""
        self._trouble = ""
        """Why the last one could not be started."""
        self._child: Child | None = None
        """None: it could not be started."""
        self.answer = self._first_answer()
        """Where it listens, or why it does not; None if it died or said nothing in time."""
        if isinstance(self.answer, Bound):
            self._config = replace(config, bind=self.answer.address, resume=self.answer.run_dir)
            threading.Thread(target=self._follow, daemon=True, name="gpuwatch-collector").start()

    @property
    def pid(self) -> int:
        """Of the process that runs now; 0 if there is none."""
        return self._child.pid if self._child is not None else 0

    def end(self, timeout_s: float) -> None:
        """The job is over here: close its input and wait. After `timeout_s` it is left to itself, for other nodes."""
        self._ending.set()
        lives = Lives()
        while self._child is not None and (code := self._child.end(timeout_s, kill=False)) is not None and code < 0:
            pause_s = lives.ended()  # it was killed, and other nodes may not have the verdict yet
            if pause_s is None or not isinstance(self.answer, Bound):
                break
            time.sleep(pause_s)
            lives.began()
            if not self._start_again():  # nothing more is to be had of it
                self._let_go()
                break

    def _start(self) -> Child | None:
        try:
            return Child("collector", self._config)
        except OSError as error:
            if str(error) != self._trouble:
                self._say(f"the collector could not be started: {error}")
            self._trouble = str(error)
            return None

    def _let_go(self) -> None:
        if self._child is not None:
            self._child.end(0.01)

    def _first_answer(self) -> Bound | CannotBind | None:
        """What ends at once may have met a moment without memory or descriptors."""
        answer = None
        for _ in range(_TRIES):
            began = time.monotonic()
            self._let_go()
            self._child = self._start()
            answer = self._first_word()
            is_final = isinstance(answer, Bound) or (answer is not None and not answer.may_pass)
            if is_final or time.monotonic() - began >= _FIRST_WORD_S:
                break
        return answer

    def _first_word(self) -> Bound | CannotBind | None:
        if self._child is None:
            return None
        timer = threading.Timer(_FIRST_WORD_S, self._child.kill)
        timer.start()
        try:
            for message in self._messages():
                if isinstance(message, Bound | CannotBind):
                    return message
            return None
        finally:
            timer.cancel()

    def _messages(self) -> Iterator[FromCollector]:
        """What it says, sentences for the user passed on."""
        if self._child is None:
            return
        try:
            for line in self._child.stdout:
                try:
                    message = read_from_collector(line)
                except msgspec.DecodeError:  # it was killed in the middle of a line
                    continue
                if isinstance(message, Notice):
                    self._say(message.text)
                yield message
        except ValueError:  # its pipe was closed meanwhile
            pass

    def _follow(self) -> None:
        """Show what it tells; when it ends before the job has, start another."""
        lives = Lives()
        while True:
            for message in self._messages():
                if isinstance(message, StageLine | PreflightOver):
                    self._show(message)
                if isinstance(message, PreflightOver):
                    self.told_all.set()
            if self._ending.is_set() or (self._child is not None and self._child.ended_well):
                break
            self.told_all.set()
            pause_s = lives.ended()
            if pause_s is None:
                self._say(f"the collector has ended {lives.short} times in a row and is not started again")
                break
            time.sleep(pause_s)
            lives.began()
            if self._ending.is_set():
                break
            self._start_again()
        self.told_all.set()

    def _start_again(self) -> bool:
        """Whether it listens again."""
        listens = isinstance(self._first_answer(), Bound)
        if listens:
            self._say("the collector had ended; it was started again and goes on with what it had received")
        return listens
