"""Sends a verdict, a stall or a forecast out of the job: a small JSON to an address, or to a command on its stdin.

Nothing waits for it: a thread of its own sends one after another, each within a deadline, and tries again if the other
side has a fault that may pass. What could not be sent is said once, in the log and on the terminal.
"""

from __future__ import annotations

import http.client
import shlex
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from ...core.codes import Code, coded
from ...core.guest.threads import start_thread
from ...core.secrets import masked_text
from ...core.text import is_web_address

_DEADLINE_S = 10.0
"""For one attempt: connecting, each read, or the whole run of a command."""
_PAUSES_S = (1.0, 4.0)
"""Before the second attempt and the third."""
PATIENCE_S = 15.0
"""For all that is outstanding when the job is over."""
_MOST_OF_DISCORD = 2000
"""It refuses a message of more characters."""
_MAY_PASS = frozenset({408, 425, 429, 500, 502, 503, 504})


NotifiedEvent = Literal["verdict", "stall", "forecast"]


class JobNotification(msgspec.Struct, frozen=True, omit_defaults=True):
    """The JSON."""

    text: str
    """What happened, in a sentence or several."""
    event: NotifiedEvent
    run: str
    folder: str
    """The run's folder, on the head node."""
    verdict: str = ""
    """Kind of the verdict: `overflow`. "" before the job is over."""
    certainty: str = ""
    exit_code: int | None = None
    rank: int | None = None
    """The verdict's rank."""
    module: str | None = None
    """The verdict's module."""


def name_of_target(target: str) -> str:
    """A target without what may be secret: the host of an address, the program of a command."""
    return urlsplit(target).hostname or "?" if is_web_address(target) else shlex.split(target)[0]


class JobNotifier:
    """`say` receives a sentence for each target that could not be notified."""

    def __init__(
        self, targets: Sequence[str], say: Callable[[str], object], pauses_s: Sequence[float] = _PAUSES_S
    ) -> None:
        self._say, self._pauses_s = say, pauses_s
        self._failed: set[str] = set()
        self._ended = {target: threading.Event() for target in targets}
        self._queues: dict[str, SimpleQueue[JobNotification | None]] = {target: SimpleQueue() for target in targets}
        self._has_begun = False

    def put(self, notification: JobNotification) -> None:
        """Send it to each target, soon."""
        if not self._has_begun:
            self._has_begun = True
            for target in self._queues:
                if not start_thread(partial(self._send_all, target)):
                    self._fail(target, "its thread did not start")
                    self._ended[target].set()
        for queue in self._queues.values():
            queue.put(notification)

    def _send_all(self, target: str) -> None:
        try:
            while (notification := self._queues[target].get()) is not None:
                self._send(target, notification)
        except Exception as error:
            self._fail(target, f"{type(error).__name__}: {error}")
        finally:
            self._ended[target].set()

    def _send(self, target: str, notification: JobNotification) -> None:
        data = _data_for(target, notification)
        why = ""
        for pause_s in (*self._pauses_s, None):
            why, may_pass = _posted(target, data) if is_web_address(target) else _handed_over(target, data)
            if not why:
                return
            if not may_pass or pause_s is None:
                break
            time.sleep(pause_s)
        self._fail(target, why)

    def _fail(self, target: str, why: str) -> None:
        if target not in self._failed:
            self._failed.add(target)
            text = f"--notify: {name_of_target(target)} could not be notified: {why}"
            self._say(coded(text, Code.NOT_NOTIFIED))

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until all is sent, at most so long."""
        ends = time.monotonic() + (patience_s if self._has_begun else 0.0)
        for queue in self._queues.values():
            queue.put(None)
        for target, ended in self._ended.items():
            if not ended.wait(max(0.0, ends - time.monotonic())) and self._has_begun:
                self._fail(target, f"it was not done within {patience_s:g} s")


def _data_for(target: str, notification: JobNotification) -> bytes:
    """Slack's and Discord's own addresses take a message and nothing else."""
    host = urlsplit(target).hostname if is_web_address(target) else None
    if host == "hooks.slack.com":
        return msgspec.json.encode({"text": notification.text})
    if host in ("discord.com", "discordapp.com"):
        return msgspec.json.encode({"content": notification.text[:_MOST_OF_DISCORD]})
    return msgspec.json.encode(notification)


def _posted(address: str, data: bytes) -> tuple[str, bool]:
    """(why it failed, whether that may pass); ("", False) if it was accepted."""
    request = urllib.request.Request(address, data, {"Content-Type": "application/json", "User-Agent": "gpuwatch"})
    try:
        with urllib.request.urlopen(request, timeout=_DEADLINE_S):
            return "", False
    except urllib.error.HTTPError as error:
        with suppress(OSError):
            error.close()
        return f"it answered {error.code} {error.reason}", error.code in _MAY_PASS
    except http.client.InvalidURL:
        return "its address is none that can be asked", False  # the error quotes the address
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__, not isinstance(error, ValueError)


def _handed_over(command: str, data: bytes) -> tuple[str, bool]:
    """As `_posted`. The command's exit code 75 says that its fault may pass (EX_TEMPFAIL of sysexits.h)."""
    try:
        ran = subprocess.run(
            shlex.split(command),
            input=data,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_DEADLINE_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"the command took longer than {_DEADLINE_S:g} s", False
    except OSError as error:
        return f"the command did not start: {error.strerror}", False
    if ran.returncode == 0:
        return "", False
    last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
    said = masked_text("".join(last))[:200]
    return f"the command ended with {ran.returncode}{': ' if last else ''}{said}", ran.returncode == 75
