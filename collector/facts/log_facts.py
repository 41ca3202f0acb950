"""What a job's logs say of its end: who waited in which collective, who raised, who was killed. Pure.

Formats: the watchdog's lines of ProcessGroupNCCL.cpp (torch 2.1 to 2.15), Python's tracebacks, the block of torchrun's
ChildFailedError (torch/distributed/elastic/multiprocessing/errors), srun's and slurmd's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ...core.identity import is_peer_failure
from ...core.known_errors import ErrorExplanation, explain
from .log_lines import LogLine

_TIMED_OUT = re.compile(
    r"(?:Watchdog caught collective operation timeout:|Work) WorkNCCL\(SeqNum=(?P<number>\d+), "
    r"OpType=(?P<operation>\w+)(?:, NumelIn=(?P<elements>\d+))?"
)
_RAN_FOR = re.compile(r"ran for (\d+) milliseconds")
_GROUP = re.compile(r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\s(\]]+))?(?P<rest>[^\]]*)\]")
_HASHED = re.compile(r"[0-9a-f]{8,}")
_PROGRESS = re.compile(
    r"last enqueued (?:\w+ )?work: (?P<begun>-?\d+), last completed (?:\w+ )?work: (?P<ended>-?\d+)", re.IGNORECASE
)
_AT_WORK = re.compile(r"(?:at work sequence id|detected by watchdog at work|Timeout at NCCL work): (\d+)")
_WORLD_SIZE = re.compile(r"\bnranks (\d+)\b|\bWORLD_SIZE=(\d+)\b|\bworld[_ ]size[=: ]+(\d+)", re.IGNORECASE)
_OLD_RANK = re.compile(r"\[Rank (\d+)\]")
_TIME = re.compile(r"\[E(\d{3,4}) (\d\d):(\d\d):(\d\d)")
_SAME_S = 900
"""Watchdogs of one hang give up within minutes; what is older is of an earlier attempt or job."""
_AGAIN = re.compile(r"will restart worker group|\d+/\d+ attempts left|kernel: (?:\[ *[\d.]+\] )?Linux version ")
"""What the file has before such a line was survived: torchrun starts the ranks again, or the host has."""
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)')
_CALL = re.compile(r"^#\d+ (?P<function>.+) from (?P<file>\S+):(?P<line>\d+)$")
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^(?P<error>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: ?(?P<message>.*))?$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_NEVER_FATAL = ("Exception ignored in", "Exception in thread", "--- Logging error ---")
_LAUNCHERS = (
    *("ChildFailedError", "SignalException", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException"),
)
_FOLLOWS = frozenset(
    {
        *("ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError", "EOFError"),
        *("TimeoutError", "ActorDiedError", "RayActorError", "RayTaskError", "CheckpointException"),
        *("RendezvousClosedError", "RendezvousTimeoutError", "RendezvousConnectionError", "DistStoreError"),
        *("KeyboardInterrupt", "SystemExit", "SIGTERMException", "CancelledError", "DistNetworkError"),
    }
)
"""Errors that a rank may raise because of another one or of a signal, or by itself."""
_SOURCES = ("gloo", "nccl", "c10d", "tcpstore", "processgroup", "torch.distributed", "pair.cc")
_ENTRY = re.compile(r"^ +(?P<key>host|rank|exitcode) +: (?P<value>.*)$")
_TASKS = re.compile(
    r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): "
    r"(?P<how>Out Of Memory|Segmentation fault|Bus error|Illegal instruction|Exited with exit code \d+)"
)
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[^)]+)\): (?P<number>\d+)")
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_MOST_MESSAGE = 8
_ORDINARY = re.compile(r"^[A-Za-z0-9]")
_LAUNCHERS_LINE = re.compile(
    r"^[EWI]\d{4} |torch/distributed|torch\.distributed|^srun|^slurmstepd|FAILED$|^Root Cause|^Failures"
)


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
    ranks: set[int] = field(default_factory=set)
    """All that wrote a line."""
    world_size: int = 0
    """0: not said."""

    def forget(self, file: str) -> None:
        """What this file has said so far was survived."""
        self.timed_out = [one for one in self.timed_out if one.line.file != file]
        self.progress = [one for one in self.progress if one.line.file != file]
        self.raised = [one for one in self.raised if one.line.file != file]
        self.failures = [one for one in self.failures if one.line.file != file]
        self.ends = [one for one in self.ends if one.line.file != file]
        self.xids = [one for one in self.xids if one.line.file != file]


def facts_of_logs(lines: Iterable[LogLine]) -> LogFacts:
    """One pass over all lines, in the order of the files."""
    return _LogReader().read(lines)


class _LogReader:
    def __init__(self) -> None:
        self._facts = LogFacts()
        self._tracebacks: dict[tuple[str, int | None], _OpenTraceback] = {}
        self._entry: dict[str, str] = {}
        self._is_first = False
        self._waiting: dict[int, TimedOutWork] = {}
        """rank -> its last work, whose group or place may follow"""
        self._stack_of: int | None = None
        """Whose stack the lines `#0 main from train.py:41` are."""
        self._of_rank: dict[int | None, list[LogLine]] = {}

    def read(self, lines: Iterable[LogLine]) -> LogFacts:
        for line in lines:
            if _AGAIN.search(line.text) is not None:
                self._begin_again(line.file)
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
        for traceback in self._tracebacks.values():
            self._close(traceback)
        self._forget_old_hangs()
        return self._facts

    def _begin_again(self, file: str) -> None:
        self._facts.forget(file)
        self._waiting = {rank: work for rank, work in self._waiting.items() if work.line.file != file}
        self._tracebacks = {key: open_ for key, open_ in self._tracebacks.items() if key[0] != file}
        self._of_rank = {rank: [line for line in lines if line.file != file] for rank, lines in self._of_rank.items()}

    def _world_size(self, line: LogLine) -> None:
        if (found := _WORLD_SIZE.search(line.text)) is not None:
            self._facts.world_size = max(self._facts.world_size, int(next(filter(None, found.groups()))))

    # -- torch's watchdog -----------------------------------------------------------------------------------------

    def _watchdog(self, line: LogLine) -> None:
        text, facts = line.text, self._facts
        rank, group = line.rank, _group_of(text)
        if rank is None and (old := _OLD_RANK.search(text)) is not None:  # torch before 2.2
            rank = int(old[1])
        call = _CALL.match(text)
        if "Stack trace of the failed collective" in text:
            self._stack_of = rank
        elif call is None:
            self._stack_of = None
        elif self._stack_of is not None and _is_users(call["file"]):
            self._replace(self._stack_of, place=f"{call['file'].rpartition('/')[2]}:{call['line']}")
        if rank is None:
            return
        if (work := _TIMED_OUT.search(text)) is not None:
            self._add_work(rank, group, work, line)
        last, at = self._waiting.get(rank), _AT_WORK.search(text)
        if group and last is not None and at is not None and last.number == int(at[1]):
            self._replace(rank, group=group)
        if group and (progress := _PROGRESS.search(text)) is not None:
            own = "from this local rank" in text or _AT_WORK.search(text) is not None
            reached = GroupProgress(rank, group, int(progress["begun"]), int(progress["ended"]), line, own)
            facts.progress.append(reached)

    def _add_work(self, rank: int, group: str, work: re.Match[str], line: LogLine) -> None:
        ran = _RAN_FOR.search(line.text)
        told = TimedOutWork(
            rank,
            group,
            int(work["number"]),
            work["operation"],
            int(work["elements"] or -1),
            int(ran[1]) / 1000 if ran is not None else 0.0,
            line,
        )
        same = (rank, told.number, told.operation)
        if not any((each.rank, each.number, each.operation) == same for each in self._facts.timed_out):
            self._facts.timed_out.append(told)
            self._waiting[rank] = told

    def _replace(self, rank: int, *, group: str = "", place: str = "") -> None:
        old = self._waiting.get(rank)
        if old is not None:
            new = old._replace(group=group or old.group, place=old.place or place)
            self._facts.timed_out = [new if each is old else each for each in self._facts.timed_out]
            self._waiting[rank] = new

    def _forget_old_hangs(self) -> None:
        """Two jobs, or two attempts, in one file have numbers that are no rank's of the other."""
        facts = self._facts
        lines = [*(one.line for one in facts.timed_out), *(one.line for one in facts.progress)]
        times = [_seconds(line) for line in lines]
        last = max((time for time in times if time is not None), default=None)
        if last is not None:
            facts.timed_out = [one for one in facts.timed_out if _is_recent(one.line, last)]
            facts.progress = [one for one in facts.progress if _is_recent(one.line, last)]

    # -- Python's tracebacks --------------------------------------------------------------------------------------

    def _traceback(self, line: LogLine) -> None:
        key = line.file, line.rank
        text = line.text
        open_ = self._tracebacks.get(key)
        header = text.find(_TRACEBACK)
        if header >= 0:
            before = open_ is not None and not open_.is_over
            chained = open_ is not None and open_.chained
            if open_ is not None and not chained:
                self._close(open_)
            caught = header > 0 or (open_ is not None and open_.caught_next)
            self._tracebacks[key] = _OpenTraceback(
                line.rank, is_mixed=before, was_caught=caught, earlier=open_ if chained else None
            )
            return
        if any(words in text for words in _NEVER_FATAL):
            if open_ is not None:
                self._close(open_)
            self._tracebacks[key] = _OpenTraceback(line.rank, is_over=True, caught_next=True)
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
        if open_.error.endswith(_LAUNCHERS):
            return
        why = open_.why()
        place = "" if open_.is_mixed else open_.place
        message = open_.message[0] if open_.message else ""
        raised = RaisedError(open_.rank, open_.error or "an error", message, place, open_.line, why)
        if open_.was_caught:
            return
        self._facts.raised.append(raised)

    # -- launchers ------------------------------------------------------------------------------------------------

    def _torchrun(self, line: LogLine) -> None:
        if line.text.startswith("Root Cause (first observed failure)"):
            self._is_first = True
        if (entry := _ENTRY.match(line.text)) is not None:
            self._entry[entry["key"]] = entry["value"].split(" ")[0]
            if entry["key"] == "exitcode" and {"host", "rank"} <= self._entry.keys():
                rank, code = self._entry["rank"], self._entry["exitcode"]
                if rank.isdigit() and code.lstrip("-").isdigit():
                    failure = TorchrunFailure(int(rank), self._entry["host"], int(code), line, self._is_first)
                    self._facts.failures.append(failure)
                self._entry, self._is_first = {}, False

    def _explain(self, lines: list[LogLine]) -> None:
        """Each known cause once for each rank, where the rank first has it."""
        for found in explain("\n".join(line.text for line in lines)):
            line = next((line for line in lines if line.text.strip()[:500] == found.line), lines[0])
            self._facts.explained.append((line, found))


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
        if not self.place or _is_users(file):
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


def _is_users(file: str) -> bool:
    return not any(part in file for part in _NOT_THE_USERS)


def _group_of(text: str) -> str:
    """The group, if its name is the same on all ranks: the default one, or one with a hashed name.

    Other names count within a process, and the groups of one split share theirs.
    """
    found = _GROUP.search(text)
    if found is None:
        return ""
    guid = found["guid"] or ""
    if "default_pg" in found["rest"] or (found["id"] == "0" and guid in ("", "0")):
        return "0"
    return guid if _HASHED.fullmatch(guid) else ""


def _seconds(line: LogLine) -> int | None:
    """When torch printed a line, in seconds of its month; None where it does not say it."""
    found = _TIME.search(line.text)
    if found is None:
        return None
    day, hours, minutes, seconds = (int(part) for part in found.groups())
    return ((day % 100) * 24 + hours) * 3600 + minutes * 60 + seconds


def _is_recent(line: LogLine, last: int) -> bool:
    seconds = _seconds(line)
    return seconds is None or last - seconds <= _SAME_S
