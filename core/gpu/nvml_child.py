"""Asks NVML through a child process (`__main__.py`). There is an answer at the deadline, whatever the driver does.

The child prints lines, one JSON value each, and a line before each question. If the driver hangs, the question is
known, and so are the answers before it.

    {"type":"started","driver":"580.95.05"}
    {"type":"asking","device":"GPU-4d1c...","what":"ECC errors"}
    {"type":"told","device":"GPU-4d1c...","values":{"ecc_uncorrected_volatile":0},"unknown":{}}
    {"type":"finished"}
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from ..events.node_events import GpuCounters, GpuXid
from ..guest.own_imports import own_command
from ..host import lines_until
from ..text import messages_among

NO_ANSWER_YET = "not asked"


class GpuProcess(msgspec.Struct, frozen=True):
    """A process on the GPU that is not of this job."""

    pid: int
    name: str


class NvmlStarted(msgspec.Struct, frozen=True, tag="started"):
    """NVML could be loaded and initialised."""

    driver: str = ""


class NvmlTrouble(msgspec.Struct, frozen=True, tag="trouble"):
    """NVML cannot be asked. The reason is one sentence without its full stop; `next` says what to do."""

    why: str
    next: str = ""


class NvmlQuestion(msgspec.Struct, frozen=True, tag="asking"):
    """The next question; `device` is "" for one that is about the driver."""

    what: str
    device: str = ""


class GpuReading(msgspec.Struct, tag="told"):
    """Facts that NVML has reported of a GPU, in one answer or in all together.

    A fact is in `values`, in `unknown` with the reason, or was never asked for.
    """

    device: str
    values: dict[str, int] = {}
    unknown: dict[str, str] = {}
    name: str = ""
    processes: list[GpuProcess] = []

    def merge(self, told: GpuReading) -> None:
        """Add an answer."""
        self.name = told.name or self.name
        self.values.update(told.values)
        self.unknown = {**self.unknown, **told.unknown}
        for name in told.values:
            self.unknown.pop(name, None)
        self.processes += told.processes

    def forget(self, names: Iterable[str], why: str) -> None:
        """Remove facts that were read and mean nothing."""
        for name in names:
            self.values.pop(name, None)
            self.unknown[name] = why


class NvmlFinished(msgspec.Struct, frozen=True, tag="finished"):
    """Everything has been asked."""


class XidWatch(msgspec.Struct, frozen=True, tag="watching"):
    """XIDs of these GPUs are reported from now on. `unwatched` says which GPUs are not watched, and why."""

    driver: str = ""
    devices: dict[str, str] = {}
    unwatched: dict[str, str] = {}


class CountersLine(msgspec.Struct, frozen=True, tag="counters"):
    """The counters of one GPU; `last` is the last GPU of that answer."""

    event: GpuCounters
    last: bool


class AskGpus(msgspec.Struct, frozen=True):
    """To a watching child: read the counters of all GPUs; without a moment their figures, a `SampleLine` each."""

    moment: str = ""


class SampleLine(msgspec.Struct, frozen=True, tag="sample"):
    """How one GPU does now; `last` is the last GPU of that answer."""

    device: str
    values: dict[str, float] = {}
    """By a key of METRICS (core/wire/columns.py)."""
    trouble: str = ""
    """Why there is no figure at all."""
    last: bool = False


Line = (
    NvmlStarted | NvmlTrouble | NvmlQuestion | GpuReading | NvmlFinished | XidWatch | GpuXid | CountersLine | SampleLine
)

LINES: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
"""In a child's output."""


@dataclass
class ChildAnswer:
    """Everything that a child has reported by its end."""

    readings: dict[str, GpuReading] = field(default_factory=dict)
    """By the UUID that was asked for; without one: of every GPU."""
    trouble: str = ""
    """Why nothing, or not everything, could be asked."""
    next: str = ""
    asking: NvmlQuestion | None = None
    """The question without an answer."""
    finished: bool = False

    def merge(self, line: Line) -> None:
        """Add a line."""
        if isinstance(line, NvmlTrouble):
            self.trouble, self.next, self.finished = line.why, line.next, True
        elif isinstance(line, NvmlQuestion):
            self.asking = line
        elif isinstance(line, GpuReading):
            self.asking = None
            self.readings.setdefault(line.device, GpuReading(line.device)).merge(line)
        elif isinstance(line, NvmlFinished):
            self.asking, self.finished = None, True


KILLED_S = 1.0
"""How long a killed child may take to end. A child that is stuck in the driver ends when the driver lets it."""


def command(*arguments: str) -> list[str]:
    """The command line of the child."""
    return own_command(__package__, *arguments)


def ask_nvml(devices: list[str], deadline_s: float, *, loaded: bool = False) -> ChildAnswer:
    """Read the GPUs with these UUIDs, or all. With `loaded` they are at work, and only what shows under load is read.

    If the deadline passes, the answer holds the facts read by then, and `trouble` names the driver's last question.
    """
    arguments = [word for uuid in devices for word in ("--device", uuid)]
    child = subprocess.Popen(
        command(*arguments, *(["--loaded"] if loaded else [])),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    answer, end, in_time = ChildAnswer(), time.monotonic() + deadline_s, False
    try:
        with suppress(TimeoutError):
            for line in messages_among(lines_until(child.stdout.fileno(), lambda: end), LINES):
                answer.merge(line)
                if answer.finished:
                    break
            in_time = True  # it has said all, or closed its output
    finally:
        code = _end(child, by_itself=in_time)
    if answer.finished:
        return answer
    asked = "" if answer.asking is None else f" when asked for {answer.asking.what}"
    if in_time:
        answer.trouble = f"the process that reads NVML ended with exit code {code}{asked}"
    else:
        answer.trouble = f"NVML did not answer within {deadline_s:.0f} s{asked}"
        answer.next = "Look at the node's kernel log for NVRM messages; a driver that hangs needs a reboot."
    return answer


def _end(child: subprocess.Popen[bytes], by_itself: bool) -> int | None:
    """Its exit code; None if it has none yet."""
    assert child.stdout is not None
    child.stdout.close()
    for _ in range(2):
        if not by_itself:
            child.kill()
        with suppress(subprocess.TimeoutExpired):
            return child.wait(KILLED_S)
        by_itself = False
    return None
