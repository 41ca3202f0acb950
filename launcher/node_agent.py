"""The node agent as its launch has it: a child that hears what torchrun does, and is started again when it ends."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from ..core.own_clock import OwnClock
from ..core.wire.keys import new_identity
from ..core.wire.pipe import AgentConfig, Notice, StopRequest, Verdict, Welcomed, read_from_agent, write_line
from .children import Child, Lives

SILENT_S = 120.0
"""At the end, an agent that is alive says so every few seconds; after so long without a word it is ended, and the next
one, which reads the recorders from the beginning, is waited for as long."""
_TICK_S = 0.2


class NodeAgent:
    """Starts it. `say` is given sentences for the user, `stop` why the ranks of this node are to end, and
    whether they may be started again."""

    def __init__(self, config: AgentConfig, say: Callable[[str], object], stop: Callable[[str, bool], object]) -> None:
        self.verdict: Verdict | None = None
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
        """It has nothing more to do: close its input and wait for it, see `Child.end`."""
        self._ending.set()
        with self._lock:
            child = self._child
        if child is not None:
            child.end(timeout_s)

    def _start(self, life: int) -> Child | None:
        try:
            return Child("launcher.node.agent", replace(self._config, life=life))
        except OSError as error:
            if not self._told_failed_start:
                self._told_failed_start = True
                self._say(f"the node agent could not be started: {error}; it is tried again")
            return None

    def _follow(self) -> None:
        """Read what it says until it has a verdict; when it ends before that, start another."""
        lives = Lives()
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
        if isinstance(message, Notice):
            self._say(message.text)
        elif isinstance(message, StopRequest):
            self._stop(message.reason, message.restart)
        elif isinstance(message, Welcomed):
            self._config = replace(self._config, run=message.run)
            self.welcomed.set()
        elif isinstance(message, Verdict):
            self.verdict = message
            self._over.set()
