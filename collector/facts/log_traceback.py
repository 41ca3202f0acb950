"""Python's tracebacks in a job's logs, and whether a rank raised by itself. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from ...core.identity import is_peer_failure
from ...core.known_errors import explain
from .log_facts import RaisedError
from .log_lines import LogLine

_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)')
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^(?P<error>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: ?(?P<message>.*))?$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_NEVER_FATAL = ("Exception ignored in", "Exception in thread", "--- Logging error ---")
_LAUNCHERS = (
    "ChildFailedError",
    "SignalException",
    "CalledProcessError",
    "ProcessRaisedException",
    "ProcessExitedException",
)
"""Of those that start ranks: they say that one has failed."""
_FOLLOWS = frozenset(
    {
        "ConnectionError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "BrokenPipeError",
        "EOFError",
        "TimeoutError",
        "ActorDiedError",
        "RayActorError",
        "RayTaskError",
        "CheckpointException",
        "RendezvousClosedError",
        "RendezvousTimeoutError",
        "RendezvousConnectionError",
        "DistStoreError",
        "KeyboardInterrupt",
        "SystemExit",
        "SIGTERMException",
        "CancelledError",
        "DistNetworkError",
    }
)
"""Errors that a rank may raise because of another one or of a signal, or by itself."""
_SOURCES = ("gloo", "nccl", "c10d", "tcpstore", "processgroup", "torch.distributed", "pair.cc")
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_MOST_MESSAGE = 8
_ORDINARY = re.compile(r"^[A-Za-z0-9]")
_LAUNCHERS_LINE = re.compile(
    r"^[EWI]\d{4} |torch/distributed|torch\.distributed|^srun|^slurmstepd|FAILED$|^Root Cause|^Failures"
)


class TracebackReader:
    """The last exception of each chain, over all lines."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int | None], _OpenTraceback] = {}
        """(file, rank) -> the one that its next line may belong to"""
        self._raised: list[RaisedError] = []

    def forget(self, file: str) -> None:
        """What this file has said so far was survived."""
        self._raised = [one for one in self._raised if one.line.file != file]
        self._open = {key: open_ for key, open_ in self._open.items() if key[0] != file}

    def raised(self) -> list[RaisedError]:
        """What was raised and not caught, once all lines were read."""
        for open_ in self._open.values():
            self._close(open_)
        return self._raised

    def on_line(self, line: LogLine) -> None:
        """The next line of the logs."""
        key = line.file, line.rank
        text = line.text
        open_ = self._open.get(key)
        header = text.find(_TRACEBACK)
        if header >= 0:
            before = open_ is not None and not open_.is_over
            chained = open_ is not None and open_.chained
            if open_ is not None and not chained:
                self._close(open_)
            caught = header > 0 or (open_ is not None and open_.caught_next)
            self._open[key] = _OpenTraceback(
                line.rank, is_mixed=before, was_caught=caught, earlier=open_ if chained else None
            )
            return
        if any(words in text for words in _NEVER_FATAL):
            if open_ is not None:
                self._close(open_)
            self._open[key] = _OpenTraceback(line.rank, is_over=True, caught_next=True)
            return
        if open_ is None or not text.strip():
            return
        if any(words in text for words in _CHAINED):
            open_.chained = True
        elif open_.is_over:
            open_.after(line)
        elif (frame := _FRAME.match(text)) is not None:
            open_.add(frame[1], int(frame[2]))
        elif not text.startswith((" ", "|", "+")):
            open_.is_over, open_.line = True, line
            raised = _RAISED.match(text)
            open_.error = raised["error"] if raised is not None else ""
            open_.message = [raised["message"] or ""] if raised is not None else [text]

    def _close(self, open_: _OpenTraceback) -> None:
        """It is complete, with all that follows of its message."""
        if open_.line is None or open_.was_told:
            return
        open_.was_told = True
        if open_.was_caught or open_.error.endswith(_LAUNCHERS):
            return
        why = open_.why()
        place = "" if open_.is_mixed else open_.place
        message = open_.message[0] if open_.message else ""
        self._raised.append(RaisedError(open_.rank, open_.error or "an error", message, place, open_.line, why))


@dataclass
class _OpenTraceback:
    rank: int | None
    is_mixed: bool = False
    """Another one of the same stream had begun and not ended: the calls may be another rank's."""
    was_caught: bool = False
    """A logger printed it, or Python said that it ends nothing."""
    caught_next: bool = False
    earlier: _OpenTraceback | None = None
    """It was raised while, or because, that one was handled."""
    chained: bool = False
    is_over: bool = False
    was_told: bool = False
    place: str = ""
    error: str = ""
    message: list[str] = field(default_factory=list)
    line: LogLine | None = None
    ordinary: int = 0
    """Lines of other output after it."""

    def add(self, file: str, number: int) -> None:
        if not self.place or is_of_script(file):
            self.place = f"{file.rpartition('/')[2]}:{number}"

    def after(self, line: LogLine) -> None:
        """A line behind the error's own: of its message, or of what goes on."""
        if (
            len(self.message) < _MOST_MESSAGE
            and self.line is not None
            and line.number - self.line.number < _MOST_MESSAGE
        ):
            self.message.append(line.text)
        if line.rank is None and _ORDINARY.match(line.text) and not _LAUNCHERS_LINE.search(line.text):
            self.ordinary += 1

    def why(self) -> Literal["own", "follows", "unclear"]:
        """Whether the rank raised it by itself, as far as its words say."""
        text = f"{self.error}: {' '.join(self.message)}"
        chain = [text]
        earlier = self.earlier
        while earlier is not None:
            chain.append(f"{earlier.error}: {' '.join(earlier.message)}")
            earlier = earlier.earlier
        whole = " ".join(chain)
        if is_peer_failure(whole):
            return "follows" if any(source in whole.lower() for source in _SOURCES) else "unclear"
        found = explain(text)
        of_nccl = "NCCL error" in text or self.error.rpartition(".")[2].startswith("Dist")
        if of_nccl or (found and not found[0].own):
            own = bool(found) and found[0].own and "no details" not in found[0].sentence
            return "own" if own else "follows"
        name = self.error.rpartition(".")[2]
        has_gone_on = self.rank is None and self.ordinary > 2
        return "unclear" if not self.error or name in _FOLLOWS or has_gone_on or "Terminated" in text else "own"


def is_of_script(file: str) -> bool:
    """Whether a file is neither of Python nor of an installed package."""
    return not any(part in file for part in _NOT_THE_USERS)
