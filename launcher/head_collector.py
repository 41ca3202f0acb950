"""Starts the collector on the head node; on other nodes, finds its address. Imports no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec
import psutil
import zmq
from msgspec.structs import replace

from ..core.codes import Code, coded
from ..core.text import from_json
from ..core.wire import pipe
from ..core.wire.keys import JobKeys
from .helper_processes import HelperLives, RestartedHelper

_FIRST_WORD_S = 30.0
"""A collector that is silent for so long is given up, unless it works:"""
_SLOW_START_S = 180.0
"""then after this. Where many processes start at once, or files come from a slow disk, its imports alone take long."""
_STILL_S = 10.0
"""One that has used no processor for so long does not work."""
_TRIES = 3
"""How often to start a collector that ends before its first word. One that stays silent is not started again."""


def _processor_s(pid: int) -> float:
    """Seconds of a processor that a process has used; 0 if it has ended."""
    with suppress(psutil.Error):
        return float(sum(psutil.Process(pid).cpu_times()[:2]))
    return 0.0


class StartedHelper(Protocol):
    """A process that is to say something."""

    pid: int

    def kill(self) -> None:
        """End it at once."""


def give_up_silent(child: StartedHelper, has_spoken: threading.Event, say: Callable[[str], object]) -> None:
    """Kill a collector that says nothing, once it does not work any more, or has worked for too long."""
    began, waited_s, used_s = time.monotonic(), max(0.0, _FIRST_WORD_S - _STILL_S), -1.0
    while not has_spoken.wait(waited_s):
        before_s, used_s = used_s, _processor_s(child.pid)
        silent_s = time.monotonic() - began
        if silent_s >= _FIRST_WORD_S:
            if used_s <= before_s or silent_s >= _SLOW_START_S:
                child.kill()
                return
            if silent_s - waited_s < _FIRST_WORD_S:
                say(f"the collector has been starting for {silent_s:.0f} s; the launch waits for it")
        waited_s = _STILL_S


class HeadCollector(RestartedHelper):
    """Restarts the collector on the same port with its store. `show` gets its lines about the preflight."""

    _name, _module, _code = "collector", "collector", Code.COLLECTOR_ENDED

    def __init__(
        self,
        config: pipe.CollectorConfig,
        say: Callable[[str], object],
        show: Callable[[pipe.StageLine | pipe.PreflightOver], object],
    ) -> None:
        super().__init__(say)
        self._config = config
        self._show = show
        self.answer = self._first_answer()
        """Where it listens, or why it does not; None if it died or said nothing in time."""
        if isinstance(self.answer, pipe.CollectorBound):
            self._config = replace(config, bind=self.answer.address, resume=self.answer.run_dir)
            threading.Thread(target=self._follow, daemon=True, name="gpuwatch-collector").start()

    def wait(self, limit_s: float) -> None:
        """Wait for its last line about the preflight, if there is to be one."""
        self._over.wait(limit_s)

    def end(self, timeout_s: float) -> None:
        """The job is over here: close its input and wait. After `timeout_s` it is left to itself, for other nodes."""
        self._ending.set()
        lives = HelperLives()
        while self._child is not None and (code := self._child.end(timeout_s, kill=False)) is not None and code < 0:
            pause_s = lives.ended()  # it was killed, and other nodes may not have the verdict yet
            if pause_s is None or not isinstance(self.answer, pipe.CollectorBound):
                break
            time.sleep(pause_s)
            if not self._start_again():  # it gives nothing more
                self._let_go()
                break

    def _let_go(self) -> None:
        if self._child is not None:
            self._child.end(0.01)

    def _first_answer(self) -> pipe.CollectorBound | pipe.CannotBind | None:
        """What ends at once may have met a moment without memory or descriptors."""
        answer = None
        for _ in range(_TRIES):
            began = time.monotonic()
            self._let_go()
            self._child = self._begin(self._config)
            answer = self._first_word()
            is_final = isinstance(answer, pipe.CollectorBound) or (answer is not None and not answer.may_pass)
            if is_final or time.monotonic() - began >= _FIRST_WORD_S:
                break
        return answer

    def _first_word(self) -> pipe.CollectorBound | pipe.CannotBind | None:
        if self._child is None:
            return None
        has_spoken = threading.Event()
        watch = threading.Thread(target=give_up_silent, args=(self._child, has_spoken, self._say), daemon=True)
        watch.start()
        try:
            return next(
                (said for said in self._messages() if isinstance(said, pipe.CollectorBound | pipe.CannotBind)), None
            )
        finally:
            has_spoken.set()

    def _messages(self) -> Iterator[pipe.FromCollector]:
        for line in self._lines():
            with suppress(msgspec.DecodeError):  # it was killed in the middle of a line
                message: pipe.FromCollector = from_json(line, pipe.FromCollector)
                if isinstance(message, pipe.UserNotice):
                    self._say(message.text)
                yield message

    def _listen(self) -> bool:
        for message in self._messages():
            if isinstance(message, pipe.StageLine | pipe.PreflightOver):
                self._show(message)
            if isinstance(message, pipe.PreflightOver):
                self._over.set()
        self._over.set()
        return self._ending.is_set() or (self._child is not None and self._child.ended_well)

    def _start_again(self) -> bool:
        if not isinstance(self._first_answer(), pipe.CollectorBound):
            return False
        text = "the collector had ended; it was started again and goes on with what it had received"
        self._say(coded(text, self._code))
        return True


# Where the collector of a job is: the handshake of its encryption tells it from any other.

_PATIENCE_MS = 5000


def first_that_answers(addresses: Sequence[str], server_key: str, public_key: str, private_key: str) -> str | None:
    """Where somebody has the private half of `server_key`: the first to answer. Waits some seconds at most."""
    context = zmq.Context()
    poller, probes = zmq.Poller(), {}
    try:
        for address in addresses:
            probe = context.socket(zmq.DEALER)
            probe.linger = 0
            probe.ipv6 = True
            probe.curve_serverkey = server_key.encode()
            probe.curve_publickey, probe.curve_secretkey = public_key.encode(), private_key.encode()
            monitor = probe.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            probes[monitor] = probe, address
            poller.register(monitor, zmq.POLLIN)
            probe.connect(address)
        ready = [monitor for monitor, _ in poller.poll(_PATIENCE_MS)]
        return next((address for monitor, (_, address) in probes.items() if monitor in ready), None)
    finally:
        for probe, _ in probes.values():
            probe.disable_monitor()
            probe.close(linger=0)
        context.destroy(linger=0)


def answers(address: str, keys: JobKeys) -> bool:
    """Whether this job's own collector listens there."""
    agent = keys.agent
    asked = keys.collector.public.decode(), agent.public.decode(), agent.private.decode()
    return first_that_answers([address], *asked) is not None
