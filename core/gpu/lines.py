"""The lines that the child process prints, one JSON value each, and the reading that they add up to.

    {"type":"started","driver":"580.95.05","library":"13.580.95.05"}
    {"type":"asking","device":"GPU-4d1c...","what":"ECC errors"}
    {"type":"told","device":"GPU-4d1c...","values":{"ecc_uncorrected_volatile":0},"unknown":{}}
    {"type":"finished"}

The child prints a line before each question. If the driver hangs, the question is known, and so are the answers
before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

NO_ANSWER_YET = "not asked"


class GpuProcess(msgspec.Struct, frozen=True):
    """A process on the GPU that is not of this job."""

    pid: int
    name: str
    memory: int | None = None
    """Bytes of the GPU's memory that it holds."""


class NvmlStarted(msgspec.Struct, frozen=True, tag="started"):
    """NVML could be loaded and initialised."""

    driver: str = ""
    library: str = ""


class NvmlTrouble(msgspec.Struct, frozen=True, tag="trouble"):
    """NVML cannot be asked. The reason is one sentence without its full stop; `next` says what to do."""

    why: str
    next: str = ""


class NvmlQuestion(msgspec.Struct, frozen=True, tag="asking"):
    """The next question; `device` is "" for one that is about the driver."""

    what: str
    device: str = ""


class NvmlAnswer(msgspec.Struct, frozen=True, tag="told"):
    """One or several answers: numbers by name, and a reason for each that is unknown."""

    device: str
    values: dict[str, int] = {}
    unknown: dict[str, str] = {}
    name: str = ""
    pci_bus: str = ""
    parent: str = ""
    """UUID of the whole GPU, where `device` is a MIG device."""
    processes: list[GpuProcess] = []


class NvmlFinished(msgspec.Struct, frozen=True, tag="finished"):
    """Everything has been asked."""


class XidWatch(msgspec.Struct, frozen=True, tag="watching"):
    """XIDs of these GPUs are reported from now on. `unwatched` says which GPUs are not watched, and why."""

    driver: str = ""
    devices: dict[str, str] = {}
    unwatched: dict[str, str] = {}


class XidLine(msgspec.Struct, frozen=True, tag="xid"):
    """An XID has come."""

    device: str
    number: int
    time_ns: int
    mig: str = ""


class CountersLine(msgspec.Struct, frozen=True, tag="counters"):
    """The counters of one GPU, asked for at `moment`; `last` is the last GPU of that answer."""

    device: str
    moment: str
    time_ns: int
    counters: dict[str, int] = {}
    unknown: dict[str, str] = {}
    mig: list[str] = []
    last: bool = False


class AskCounters(msgspec.Struct, frozen=True, tag="ask"):
    """To a watching child: read the counters of all GPUs."""

    moment: str


class AskSamples(msgspec.Struct, frozen=True, tag="ask_samples"):
    """To a watching child: read the figures of all GPUs, a `SampleLine` each."""


class SampleLine(msgspec.Struct, frozen=True, tag="sample"):
    """How one GPU does now; `last` is the last GPU of that answer."""

    device: str
    values: dict[str, float] = {}
    """By a key of METRICS (core/metrics.py)."""
    trouble: str = ""
    """Why there is no figure at all."""
    last: bool = False


Line = (
    NvmlStarted
    | NvmlTrouble
    | NvmlQuestion
    | NvmlAnswer
    | NvmlFinished
    | XidWatch
    | XidLine
    | CountersLine
    | SampleLine
)

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def parse(line: bytes) -> Line | None:
    """One line of a child; None for a line that a library printed."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError:
        return None


@dataclass
class GpuReading:
    """One GPU as NVML described it. A fact is in `values`, in `unknown`, or was never asked for."""

    device: str
    name: str = ""
    pci_bus: str = ""
    parent: str = ""
    values: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    processes: list[GpuProcess] = field(default_factory=list)

    def take(self, told: NvmlAnswer) -> None:
        """Add an answer."""
        self.name = told.name or self.name
        self.pci_bus = told.pci_bus or self.pci_bus
        self.parent = told.parent or self.parent
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

    def why_unknown(self, fact: str) -> str:
        """Why a fact is not in `values`."""
        return self.unknown.get(fact, NO_ANSWER_YET)


@dataclass
class ChildAnswer:
    """What a child has told by its end."""

    readings: dict[str, GpuReading] = field(default_factory=dict)
    """By the UUID that was asked for; without one: of every GPU."""
    driver: str = ""
    trouble: str = ""
    """Why nothing, or not everything, could be asked."""
    next: str = ""
    asking: NvmlQuestion | None = None
    """The question without an answer."""
    finished: bool = False

    def take(self, line: Line) -> None:
        """Add a line."""
        if isinstance(line, NvmlStarted):
            self.driver = line.driver
        elif isinstance(line, NvmlTrouble):
            self.trouble, self.next, self.finished = line.why, line.next, True
        elif isinstance(line, NvmlQuestion):
            self.asking = line
        elif isinstance(line, NvmlAnswer):
            self.asking = None
            self.readings.setdefault(line.device, GpuReading(line.device)).take(line)
        elif isinstance(line, NvmlFinished):
            self.asking, self.finished = None, True
