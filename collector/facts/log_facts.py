"""What a job's logs say of its end: who waited in which collective, who raised, who was killed. Pure.

Formats: the watchdog's lines of ProcessGroupNCCL.cpp (torch 2.1 to 2.15), Python's tracebacks, the block of torchrun's
ChildFailedError (torch/distributed/elastic/multiprocessing/errors), srun's and slurmd's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.identity import is_peer_failure
from ...core.known_errors import ErrorExplanation, explain
from .log_lines import LogLine

_TIMED_OUT = re.compile(
    r"(?:Watchdog caught collective operation timeout:|Work) WorkNCCL\(SeqNum=(?P<number>\d+), "
    r"OpType=(?P<operation>\w+)(?:, NumelIn=(?P<elements>\d+))?"
)
_RAN_FOR = re.compile(r"ran for (\d+) milliseconds")
_GROUP = re.compile(r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\s(\]]+))?[^\]]*\]")
_PROGRESS = re.compile(
    r"last enqueued (?:\w+ )?work: (?P<begun>-?\d+), last completed (?:\w+ )?work: (?P<ended>-?\d+)", re.I
)
_AT_WORK = re.compile(r"(?:at work sequence id|detected by watchdog at work|Timeout at NCCL work): (\d+)")
_FIRST = re.compile(r"collective timeout from +rank (\d+)")
_WORLD_SIZE = re.compile(r"\bnranks (\d+)\b|\bWORLD_SIZE=(\d+)\b|\bworld[_ ]size[=: ]+(\d+)", re.IGNORECASE)
_OLD_RANK = re.compile(r"\[Rank (\d+)\]")
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)')
_CALL = re.compile(r"^#\d+ (?P<function>.+) from (?P<file>\S+):(?P<line>\d+)$")
_RAISED = re.compile(
    r"^(?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Iteration|Warning|Failed))(?:: ?(?P<message>.*))?$"
)
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_LAUNCHERS = (
    "ChildFailedError",
    "SignalException",
    "CalledProcessError",
    "ProcessRaisedException",
    "ProcessExitedException",
)
_ENTRY = re.compile(r"^ +(?P<key>host|rank|exitcode) +: (?P<value>.*)$")
_TASKS = re.compile(
    r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): "
    r"(?P<how>Out Of Memory|Segmentation fault|Bus error|Illegal instruction)"
)
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[^)]+)\): (?P<number>\d+)")
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")


class TimedOutWork(NamedTuple):
    """A collective in which a rank waited until its watchdog gave up."""

    rank: int
    group: str
    """"" where the log does not say it."""
    number: int
    operation: str
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
    """The first exception of a chain."""

    rank: int | None
    error: str
    message: str
    place: str
    """`train.py:41`, of the script where it can be told; "" without one."""
    line: LogLine

    @property
    def is_own(self) -> bool:
        """Whether the rank raised it by itself, and not because another one was gone."""
        text = f"{self.error}: {self.message}"
        if is_peer_failure(text) or self.error in ("KeyboardInterrupt", "SystemExit"):
            return False
        found = explain(text)
        if found or self.error.rpartition(".")[2].startswith("Dist"):
            return bool(found) and found[0].own
        return True


class TorchrunFailure(NamedTuple):
    """An entry of torchrun's block."""

    rank: int
    host: str
    code: int
    line: LogLine


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
    ranks: set[int] = field(default_factory=set)
    """All that wrote a line."""
    world_size: int = 0
    """0: not said."""
    first_timeout: int | None = None
    """Whose watchdog told the others."""


def facts_of_logs(lines: Iterable[LogLine]) -> LogFacts:
    """One pass over all lines, in the order of the files."""
    return _LogReader().read(lines)


class _LogReader:
    def __init__(self) -> None:
        self._facts = LogFacts()
        self._tracebacks: dict[tuple[str, int | None], _OpenTraceback] = {}
        self._entry: dict[str, str] = {}
        self._waiting: dict[int, int] = {}
        """rank -> the number of its entry in `timed_out` whose group is not known yet"""
        self._stack_of: int | None = None
        """Whose stack the lines `#0 main from train.py:41` are."""
        self._of_rank: dict[int | None, list[LogLine]] = {}

    def read(self, lines: Iterable[LogLine]) -> LogFacts:
        for line in lines:
            if line.rank is not None:
                self._facts.ranks.add(line.rank)
            self._world_size(line)
            self._watchdog(line)
            self._traceback(line)
            self._torchrun(line)
            if (found := _TASKS.search(line.text)) is not None:
                self._facts.ends.append(SchedulerEnd(found["host"], found["tasks"], found["how"], line))
            if (xid := _XID.search(line.text)) is not None:
                self._facts.xids.append(LoggedXid(line, xid["bus"], int(xid["number"])))
            self._of_rank.setdefault(line.rank, []).append(line)
        for lines_of_rank in self._of_rank.values():
            self._explain(lines_of_rank)
        return self._facts

    def _world_size(self, line: LogLine) -> None:
        if (found := _WORLD_SIZE.search(line.text)) is not None:
            self._facts.world_size = max(self._facts.world_size, int(next(filter(None, found.groups()))))

    def _watchdog(self, line: LogLine) -> None:
        text, facts = line.text, self._facts
        rank = line.rank
        if rank is None and (old := _OLD_RANK.search(text)) is not None:  # torch before 2.2
            rank = int(old[1])
        if (first := _FIRST.search(text)) is not None:
            facts.first_timeout = int(first[1])
        group = _group_of(text)
        if "Stack trace of the failed collective" in text:
            self._stack_of = rank
        elif not _CALL.match(text):
            self._stack_of = None
        rank = self._stack_of if self._stack_of is not None else rank
        if rank is None:
            return
        if (work := _TIMED_OUT.search(text)) is not None:
            told = TimedOutWork(
                rank,
                group,
                int(work["number"]),
                work["operation"],
                int(work["elements"] or -1),
                int(ran[1]) / 1000 if (ran := _RAN_FOR.search(text)) is not None else 0.0,
                line,
            )
            if not any((each.rank, each.number, each.operation) == told[:1] + told[2:4] for each in facts.timed_out):
                facts.timed_out.append(told)
                self._waiting[rank] = len(facts.timed_out) - 1
        if group and (at_work := _AT_WORK.search(text)) is not None and rank in self._waiting:
            place = self._waiting[rank]
            if facts.timed_out[place].number == int(at_work[1]):
                facts.timed_out[place] = facts.timed_out[place]._replace(group=group)
        if group and (progress := _PROGRESS.search(text)) is not None:
            own = "from this local rank" in text or _AT_WORK.search(text) is not None
            reached = GroupProgress(rank, group, int(progress["begun"]), int(progress["ended"]), line, own)
            facts.progress.append(reached)
        if (call := _CALL.match(text)) is not None and self._stack_of is not None:
            entry = self._waiting.get(self._stack_of)
            if entry is not None and not facts.timed_out[entry].place and _is_users(call["file"]):
                at = f"{call['file'].rpartition('/')[2]}:{call['line']}"
                facts.timed_out[entry] = facts.timed_out[entry]._replace(place=at)

    def _traceback(self, line: LogLine) -> None:
        key = line.file, line.rank
        text = line.text
        open_ = self._tracebacks.get(key)
        if text.startswith("Traceback (most recent call last):"):
            self._tracebacks[key] = _OpenTraceback(chained=open_ is not None and open_.chained)
            return
        if open_ is None:
            return
        if any(words in text for words in _CHAINED):
            open_.chained = True
            return
        if open_.is_over or not text.strip():
            return
        if (frame := _FRAME.match(text)) is not None:
            open_.add(frame[1], int(frame[2]))
        elif not text.startswith(" "):
            open_.is_over = True
            raised = _RAISED.match(text)
            if raised is not None and not open_.chained and not raised["error"].endswith(_LAUNCHERS):
                error = RaisedError(line.rank, raised["error"], raised["message"] or "", open_.place, line)
                self._facts.raised.append(error)
            open_.chained = False

    def _torchrun(self, line: LogLine) -> None:
        if (entry := _ENTRY.match(line.text)) is not None:
            self._entry[entry["key"]] = entry["value"].split(" ")[0]
            if entry["key"] == "exitcode" and {"host", "rank"} <= self._entry.keys():
                rank, code = self._entry["rank"], self._entry["exitcode"]
                if rank.isdigit() and code.lstrip("-").isdigit():
                    self._facts.failures.append(TorchrunFailure(int(rank), self._entry["host"], int(code), line))
                self._entry = {}

    def _explain(self, lines: list[LogLine]) -> None:
        """Each known cause once for each rank, where the rank first has it."""
        for found in explain("\n".join(line.text for line in lines)):
            line = next((line for line in lines if line.text.strip()[:500] == found.line), lines[0])
            self._facts.explained.append((line, found))


@dataclass
class _OpenTraceback:
    chained: bool = False
    """It was raised while, or because, the one before it was handled."""
    is_over: bool = False
    place: str = ""

    def add(self, file: str, number: int) -> None:
        if not self.place or _is_users(file):
            self.place = f"{file.rpartition('/')[2]}:{number}"


def _is_users(file: str) -> bool:
    return not any(part in file for part in _NOT_THE_USERS)


def _group_of(text: str) -> str:
    found = _GROUP.search(text)
    return "" if found is None else f"{found['guid'] or found['id']}"
