"""Starts the collector and the node agent as children of the launch: first line in is their settings, a closed pipe
tells them that the launch is gone, and Ctrl-C in the terminal does not reach them."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec
from msgspec.structs import replace

from ..core.host import OwnClock
from ..core.own_imports import own_command
from ..core.wire.keys import new_identity
from ..core.wire.pipe import (
    AgentConfig,
    CannotBind,
    CollectorBound,
    CollectorConfig,
    FromCollector,
    JobResult,
    NodeWelcomed,
    PreflightOver,
    StageLine,
    StopRequest,
    UserNotice,
    read_from_agent,
    read_from_collector,
    write_line,
)

LIVED_S = 10.0
MOST_SHORT_LIVES = 10
_LONGEST_PAUSE_S = 5.0


class HelperLives:
    """Whether, and after what pause, a helper that has ended is started again: not if it ends at once each time."""

    def __init__(self) -> None:
        self.short = 0
        """How many in a row have ended within `LIVED_S`."""
        self._began = time.monotonic()

    def ended(self) -> float | None:
        """The one that ran has ended. Returns the pause in seconds; None if it is not to be started again."""
        self.short = self.short + 1 if time.monotonic() - self._began < LIVED_S else 1
        return min(0.05 * 2**self.short, _LONGEST_PAUSE_S) if self.short < MOST_SHORT_LIVES else None

    def began(self) -> None:
        """Another one is started."""
        self._began = time.monotonic()


class HelperProcess:
    """A helper process with JSON lines in and out. Raises OSError where no process can be started.

    One that cannot be told its settings is ended, and who reads its output sees that it has.
    """

    def __init__(self, module: str, config: msgspec.Struct, log: Path | None = None) -> None:
        with open(log or os.devnull, "ab") as errors:  # noqa: PTH123  # os.devnull is no Path
            self._process = subprocess.Popen(
                own_command(f"gpuwatch.{module}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                close_fds=True,
            )
        if not write_line(self.stdin, config):
            self._process.kill()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def ended_well(self) -> bool:
        """Whether it comes to an end by itself, now that its output is closed."""
        try:
            return self._process.wait(5.0) == 0
        except subprocess.TimeoutExpired:
            return False

    @property
    def stdin(self) -> IO[bytes]:
        """Where it reads."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Where it writes."""
        assert self._process.stdout is not None
        return self._process.stdout

    def end(self, timeout_s: float, *, kill: bool = True) -> int | None:
        """Close its input and wait for it to finish. After `timeout_s` it is killed, or left to itself.

        Returns its exit code, None if it had none of its own.
        """
        try:
            self.stdin.close()
        except OSError:
            pass
        if not timeout_s:
            return None
        try:
            code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            if not kill:
                return None
            self._process.kill()
            self._process.wait()
            code = None
        self.stdout.close()
        return code

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


# The collector as the head node's launch has it: a child that is started again, on the same port with its store.

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
        self._child: HelperProcess | None = None
        """None: it could not be started."""
        self.answer = self._first_answer()
        """Where it listens, or why it does not; None if it died or said nothing in time."""
        if isinstance(self.answer, CollectorBound):
            self._config = replace(config, bind=self.answer.address, resume=self.answer.run_dir)
            threading.Thread(target=self._follow, daemon=True, name="gpuwatch-collector").start()

    @property
    def pid(self) -> int:
        """Of the process that runs now; 0 if there is none."""
        return self._child.pid if self._child is not None else 0

    def end(self, timeout_s: float) -> None:
        """The job is over here: close its input and wait. After `timeout_s` it is left to itself, for other nodes."""
        self._ending.set()
        lives = HelperLives()
        while self._child is not None and (code := self._child.end(timeout_s, kill=False)) is not None and code < 0:
            pause_s = lives.ended()  # it was killed, and other nodes may not have the verdict yet
            if pause_s is None or not isinstance(self.answer, CollectorBound):
                break
            time.sleep(pause_s)
            lives.began()
            if not self._start_again():  # nothing more is to be had of it
                self._let_go()
                break

    def _start(self) -> HelperProcess | None:
        try:
            return HelperProcess("collector", self._config)
        except OSError as error:
            if str(error) != self._trouble:
                self._say(f"the collector could not be started: {error}")
            self._trouble = str(error)
            return None

    def _let_go(self) -> None:
        if self._child is not None:
            self._child.end(0.01)

    def _first_answer(self) -> CollectorBound | CannotBind | None:
        """What ends at once may have met a moment without memory or descriptors."""
        answer = None
        for _ in range(_TRIES):
            began = time.monotonic()
            self._let_go()
            self._child = self._start()
            answer = self._first_word()
            is_final = isinstance(answer, CollectorBound) or (answer is not None and not answer.may_pass)
            if is_final or time.monotonic() - began >= _FIRST_WORD_S:
                break
        return answer

    def _first_word(self) -> CollectorBound | CannotBind | None:
        if self._child is None:
            return None
        timer = threading.Timer(_FIRST_WORD_S, self._child.kill)
        timer.start()
        try:
            for message in self._messages():
                if isinstance(message, CollectorBound | CannotBind):
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
                if isinstance(message, UserNotice):
                    self._say(message.text)
                yield message
        except ValueError:  # its pipe was closed meanwhile
            pass

    def _follow(self) -> None:
        """Show what it tells; when it ends before the job has, start another."""
        lives = HelperLives()
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
        listens = isinstance(self._first_answer(), CollectorBound)
        if listens:
            self._say("the collector had ended; it was started again and goes on with what it had received")
        return listens


# The node agent as its launch has it: a child that hears what torchrun does, and is started again when it ends.

SILENT_S = 120.0
"""At the end, an agent that is alive says so every few seconds; after so long without a word it is ended, and the next
one, which reads the recorders from the beginning, is waited for as long."""
_TICK_S = 0.2


class NodeAgent:
    """Starts it. `say` is given sentences for the user, `stop` why the ranks of this node are to end, and
    whether they may be started again."""

    def __init__(self, config: AgentConfig, say: Callable[[str], object], stop: Callable[[str, bool], object]) -> None:
        self.verdict: JobResult | None = None
        self.welcomed = threading.Event()
        """The collector has taken this node into its run."""
        self._config = replace(config, identity=new_identity())
        self._say = say
        self._stop = stop
        self._told: list[msgspec.Struct] = []
        self._lock = threading.Lock()
        """An agent that is started again hears all that was told, in order."""
        self._ending = threading.Event()
        self._over = threading.Event()
        self._lines = 0
        self._told_failed_start = False
        self._child = self._start(0)
        """None: it could not be started; that is tried again."""
        threading.Thread(target=self._follow, daemon=True, name="gpuwatch-agent").start()

    @property
    def pid(self) -> int:
        """Of the process that runs now; 0 if there is none."""
        return self._child.pid if self._child is not None else 0

    @property
    def is_over(self) -> bool:
        """It has a verdict, or has been given up."""
        return self._over.is_set()

    def tell(self, message: msgspec.Struct) -> None:
        """Tell it something, and whoever comes after it."""
        with self._lock:
            self._told.append(message)
            if self._child is not None:
                write_line(self._child.stdin, message)

    def wait(self) -> None:
        """Until it has a verdict or is given up."""
        clock, lines, heard, was_ended = OwnClock(), self._lines, 0.0, False
        while not self._over.wait(_TICK_S):
            self._tell_the_rest()
            now = clock.now()
            if lines != self._lines:
                lines, heard = self._lines, now
            if now - heard > SILENT_S:
                self._say("the node agent does not answer")
                if was_ended:
                    return
                was_ended, heard = True, now
                self._kill()

    def _kill(self) -> None:
        """Whoever follows it starts another one."""
        with self._lock:
            if self._child is not None:
                self._child.kill()

    def _tell_the_rest(self) -> None:
        """What its pipe did not take at first."""
        with self._lock, suppress(OSError, ValueError):
            if self._child is not None:
                self._child.stdin.flush()

    def end(self, timeout_s: float) -> None:
        """It has nothing more to do: close its input and wait for it, see `HelperProcess.end`."""
        self._ending.set()
        with self._lock:
            child = self._child
        if child is not None:
            child.end(timeout_s)

    def _start(self, life: int) -> HelperProcess | None:
        try:
            return HelperProcess("launcher.agent.agent", replace(self._config, life=life))
        except OSError as error:
            if not self._told_failed_start:
                self._told_failed_start = True
                self._say(f"the node agent could not be started: {error}; it is tried again")
            return None

    def _follow(self) -> None:
        """Read what it says until it has a verdict; when it ends before that, start another."""
        lives = HelperLives()
        for life in itertools.count(1):
            self._listen()
            if self.verdict is not None or self._ending.is_set():
                break
            pause_s = lives.ended()
            if pause_s is None:
                self._say(f"the node agent has ended {lives.short} times in a row and is not started again")
                break
            if self._child is not None:
                self._say("the node agent has ended; it is started again, and reads the recorders from the beginning")
            time.sleep(pause_s)
            lives.began()
            with self._lock:
                if self._ending.is_set():
                    break
                if self._child is not None:
                    self._child.end(0.01)
                self._child = child = self._start(life)
                if child is not None:
                    for message in self._told:
                        write_line(child.stdin, message)
        self._over.set()

    def _listen(self) -> None:
        if self._child is None:
            return
        try:
            for line in self._child.stdout:
                self._lines += 1
                self._hear(line)
        except ValueError:  # its pipe was closed meanwhile
            pass

    def _hear(self, line: bytes) -> None:
        try:
            message = read_from_agent(line)
        except msgspec.DecodeError:  # it was killed in the middle of a line
            return
        if isinstance(message, UserNotice):
            self._say(message.text)
        elif isinstance(message, StopRequest):
            self._stop(message.reason, message.restart)
        elif isinstance(message, NodeWelcomed):
            self._config = replace(self._config, run=message.run)
            self.welcomed.set()
        elif isinstance(message, JobResult):
            self.verdict = message
            self._over.set()
