"""What a job's logs say of its end: who waited in which collective, who raised, who was killed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ...core.known_errors import ErrorExplanation
from .log_lines import LogLine


class TimedOutWork(NamedTuple):
    """A collective in which a rank waited until its watchdog gave up."""

    rank: int
    group: str
    """"" where the log does not say it, or says it in a way that differs between ranks."""
    number: int
    operation: str
    """"" where its own line is missing."""
    elements: int
    """-1: not said."""
    seconds: float
    line: LogLine
    place: str = ""
    """`train.py:41`, where torch has printed its stack."""


class GroupProgress(NamedTuple):
    """How far a rank had got in a group, by its own words."""

    rank: int
    group: str
    begun: int
    ended: int
    line: LogLine
    timed_out: bool = False
    """Its own watchdog gave up."""


class RaisedError(NamedTuple):
    """The last exception of a chain."""

    rank: int | None
    error: str
    message: str
    place: str
    """`train.py:41`, of the script where it can be told; "" without one."""
    line: LogLine
    why: Literal["own", "follows", "unclear"] = "own"
    """`follows`: another rank was gone, as it says itself. `unclear`: it may be that, or was caught."""


class TorchrunFailure(NamedTuple):
    """An entry of torchrun's block."""

    rank: int
    host: str
    code: int
    line: LogLine
    is_first: bool
    """That of its node that torchrun saw first."""


class SchedulerEnd(NamedTuple):
    """What srun says of tasks."""

    host: str
    tasks: str
    how: str
    line: LogLine


class LoggedXid(NamedTuple):
    """What the NVIDIA driver said of a GPU."""

    line: LogLine
    bus: str
    number: int


@dataclass
class LogFacts:
    """Of all files together."""

    timed_out: list[TimedOutWork] = field(default_factory=list)
    progress: list[GroupProgress] = field(default_factory=list)
    raised: list[RaisedError] = field(default_factory=list)
    failures: list[TorchrunFailure] = field(default_factory=list)
    ends: list[SchedulerEnd] = field(default_factory=list)
    xids: list[LoggedXid] = field(default_factory=list)
    explained: list[tuple[LogLine, ErrorExplanation]] = field(default_factory=list)
    with_watchdogs: set[str] = field(default_factory=set)
    """Files in which a watchdog of torch's, or one of its process groups, has reported an error."""
    ranks: set[int] = field(default_factory=set)
    """All that wrote a line."""
    world_size: int = 0
    """0: not said."""

    def forget(self, file: str) -> None:
        """What this file has said so far was survived."""
        self.with_watchdogs.discard(file)
        self.timed_out = [one for one in self.timed_out if one.line.file != file]
        self.progress = [one for one in self.progress if one.line.file != file]
        self.failures = [one for one in self.failures if one.line.file != file]
        self.ends = [one for one in self.ends if one.line.file != file]
        self.xids = [one for one in self.xids if one.line.file != file]
