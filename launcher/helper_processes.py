"""Starts the helpers of a launch as its children, the node agent above all: first line in is their settings, a closed
pipe tells them that the launch is gone, and Ctrl-C in the terminal does not reach them."""

from __future__ import annotations

import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import IO

import msgspec
from msgspec.structs import replace

from ..core.codes import Code, coded
from ..core.guest.own_imports import own_command
from ..core.host import OwnClock
from ..core.text import from_json
from ..core.wire.messages import StopRanks
from ..core.wire.pipe import AgentConfig, ConnectionHanded, FromAgent, JobResult, NodeWelcomed, UserNotice, write_line
from .held_connection import HeldConnection

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
        now = time.monotonic()
        self.short = self.short + 1 if now - self._began < LIVED_S else 1
        pause_s = min(0.05 * 2**self.short, _LONGEST_PAUSE_S)
        self._began = now + pause_s
        return pause_s if self.short < MOST_SHORT_LIVES else None


class HelperProcess:
    """A helper process with JSON lines in and out. Raises OSError where no process can be started.

    If its settings cannot be written to it, it is killed, and a reader of its output sees the end.
    """

    def __init__(self, module: str, config: msgspec.Struct, inherited: Collection[int] = ()) -> None:
        """`inherited` are descriptors that it has as well."""
        with open(os.devnull, "ab") as errors:  # noqa: PTH123  # os.devnull is no Path
            self._process = subprocess.Popen(
                own_command(f"gpuwatch.{module}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                pass_fds=inherited,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid = self._process.pid
        """It may have ended."""
        self.stdin: IO[bytes] = self._process.stdin
        self.stdout: IO[bytes] = self._process.stdout
        if not write_line(self.stdin, config):
            self._process.kill()

    @property
    def ended_well(self) -> bool:
        """Whether it ends by itself, now that its output is closed."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(5.0) == 0
        return False

    def end(self, timeout_s: float, *, kill: bool = True) -> int | None:
        """Close its input and wait for it to finish. After `timeout_s` it is killed, or left to itself.

        Returns its exit code, None if it had none of its own.
        """
        with suppress(OSError):
            self.stdin.close()
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


class RestartedHelper:
    """A helper that is started again when it ends before its job does. `say` takes sentences for the user."""

    _name: str
    _module: str
    _code: Code
    _if_not_started = ""
    """What follows then, for the user."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._ending = threading.Event()
        self._over = threading.Event()
        """Set once nobody needs to wait for another line of it."""
        self._heard = 0
        """Lines."""
        self._trouble = ""
        """Why the last one could not be started."""
        self._child: HelperProcess | None = None
        """None: it could not be started."""

    @property
    def pid(self) -> int:
        """Process id of the running process; 0 if there is none."""
        return self._child.pid if self._child is not None else 0

    def _begin(self, config: msgspec.Struct, inherited: Collection[int] = ()) -> HelperProcess | None:
        try:
            return HelperProcess(self._module, config, inherited)
        except OSError as error:
            if str(error) != self._trouble:
                self._say(coded(f"the {self._name} could not be started: {error}{self._if_not_started}", self._code))
            self._trouble = str(error)
            return None

    def _lines(self) -> Iterator[bytes]:
        if self._child is not None:
            with suppress(ValueError):  # its pipe was closed meanwhile
                for line in self._child.stdout:  # no `yield from`: that closes the pipe with the generator
                    self._heard += 1
                    yield line

    def _follow(self) -> None:
        """Hear what it says; when it ends before the job has, start another."""
        lives = HelperLives()
        while not self._listen():
            pause_s = lives.ended()
            if pause_s is None:
                text = f"the {self._name} has ended {lives.short} times in a row and is not started again"
                self._say(coded(text, self._code))
                break
            time.sleep(pause_s)
            if self._ending.is_set():
                break
            self._start_again()
        self._over.set()

    def _listen(self) -> bool:
        """Read its lines to its end. Returns whether no other process is needed."""
        raise NotImplementedError

    def _start_again(self) -> bool:
        raise NotImplementedError


# The node agent as its launch has it: a child that hears what torchrun does.

SILENT_S = 120.0
"""At the end, an agent reports every few seconds that it is alive. After this long without a report it is ended, and
the next one, which reads the recorders from the beginning, gets as long."""
_TICK_S = 0.2


class NodeAgent(RestartedHelper):
    """Starts it. `stop` is given why the ranks of this node are to end, and whether they may be started again."""

    _name, _module, _code = "node agent", "launcher.agent.agent", Code.AGENT_ENDED
    _if_not_started = "; it is tried again"

    def __init__(self, config: AgentConfig, say: Callable[[str], object], stop: Callable[[str, bool], object]) -> None:
        super().__init__(say)
        self.verdict: JobResult | None = None
        self.welcomed = threading.Event()
        """The collector has taken this node into its run."""
        self._config = replace(config, identity=secrets.token_hex(16))
        self._stop = stop
        self._told: list[msgspec.Struct] = []
        self._lock = threading.Lock()
        """An agent that is started again hears all messages, in order."""
        self._connection = HeldConnection()
        self._child = self._begin_agent()
        threading.Thread(target=self._follow, daemon=True, name="gpuwatch-agent").start()

    def _begin_agent(self) -> HelperProcess | None:
        its_own = self._connection.begin()
        if its_own is None:
            return self._begin(self._config)
        with its_own:
            return self._begin(replace(self._config, launch_fd=its_own.fileno()), [its_own.fileno()])

    @property
    def is_over(self) -> bool:
        """It has a verdict, or has been given up."""
        return self._over.is_set()

    def send(self, message: msgspec.Struct) -> None:
        """Tell it something, and whoever comes after it."""
        with self._lock:
            self._told.append(message)
            if self._child is not None:
                write_line(self._child.stdin, message)

    def wait(self) -> None:
        """Wait until it has a verdict or is given up."""
        clock, lines, heard, was_ended = OwnClock(), self._heard, 0.0, False
        while not self._over.wait(_TICK_S):
            with self._lock, suppress(OSError, ValueError):  # what its pipe did not take at first
                if self._child is not None:
                    self._child.stdin.flush()
            now = clock.now()
            if lines != self._heard:
                lines, heard = self._heard, now
            if now - heard > SILENT_S:
                self._say(coded("the node agent does not answer", self._code))
                if was_ended:
                    return
                was_ended, heard = True, now
                with self._lock:
                    if self._child is not None:  # whoever follows it starts another one
                        self._child.kill()

    def end(self, timeout_s: float) -> None:
        """It has nothing more to do: close its input and wait for it, see `HelperProcess.end`."""
        self._ending.set()
        with self._lock:
            child = self._child
        if child is not None:
            child.end(timeout_s)
        with self._lock:
            self._connection.close()

    def _start_again(self) -> bool:
        with self._lock:
            if self._ending.is_set():
                return False
            if self._child is not None:
                text = "the node agent has ended; it is started again, and reads the recorders from the beginning"
                self._say(coded(text, self._code))
                self._child.end(0.01)
            self._config = replace(self._config, life=self._config.life + 1)
            self._child = self._begin_agent()
            if self._child is not None:
                for message in self._told:
                    write_line(self._child.stdin, message)
            return self._child is not None

    def _listen(self) -> bool:
        for line in self._lines():
            with suppress(msgspec.DecodeError):  # it was killed in the middle of a line
                self._hear(from_json(line, FromAgent))
        return self.verdict is not None or self._ending.is_set()

    def _hear(self, message: FromAgent) -> None:
        if isinstance(message, UserNotice):
            self._say(message.text)
        elif isinstance(message, StopRanks):
            self._stop(message.reason, message.restart)
        elif isinstance(message, ConnectionHanded):
            with self._lock:
                self._connection.take()
        elif isinstance(message, NodeWelcomed):
            self._config = replace(self._config, hello=replace(self._config.hello, run=message.run))
            self.welcomed.set()
        elif isinstance(message, JobResult):
            self.verdict = message
            self._over.set()
