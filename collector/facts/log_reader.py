"""The facts of a job's logs, line by line. Pure.

Formats: the watchdog's lines of ProcessGroupNCCL.cpp (torch 2.1 to 2.15), Python's tracebacks (log_traceback.py), the
block of torchrun's ChildFailedError (torch/distributed/elastic/multiprocessing/errors), srun's and slurmd's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...core.known_errors import explain
from .log_facts import GroupProgress, LogFacts, LoggedXid, SchedulerEnd, TimedOutWork, TorchrunFailure
from .log_lines import LogLine
from .log_traceback import TracebackReader, is_of_script

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
_ALARM = re.compile(r"[Ww]atchdog|\[E[\d :.]* ?ProcessGroup")
_OLD_RANK = re.compile(r"\[Rank (\d+)\]")
_TIME = re.compile(r"\[E(\d{3,4}) (\d\d):(\d\d):(\d\d)")
_SAME_S = 900
"""Watchdogs of one hang give up within minutes; what is older is of an earlier attempt or job."""
_AGAIN = re.compile(r"will restart worker group|\d+/\d+ attempts left|kernel: (?:\[ *[\d.]+\] )?Linux version ")
"""What the file has before such a line was survived: torchrun starts the ranks again, or the host has."""
_CALL = re.compile(r"^#\d+ (?P<function>.+) from (?P<file>\S+):(?P<line>\d+)$")
_ENTRY = re.compile(r"^ +(?P<key>host|rank|exitcode) +: (?P<value>.*)$")
_TASKS = re.compile(
    r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): "
    r"(?P<how>Out Of Memory|Segmentation fault|Bus error|Illegal instruction|Exited with exit code \d+)"
)
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[^)]+)\): (?P<number>\d+)")


def facts_of_logs(lines: Iterable[LogLine]) -> LogFacts:
    """One pass over all lines, in the order of the files."""
    return _LogReader().read(lines)


class _LogReader:
    def __init__(self) -> None:
        self._facts = LogFacts()
        self._tracebacks = TracebackReader()
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
            self._tracebacks.on_line(line)
            self._torchrun(line)
            if (found := _TASKS.search(line.text)) is not None:
                self._facts.ends.append(SchedulerEnd(found["host"], found["tasks"], found["how"], line))
            if (xid := _XID.search(line.text)) is not None:
                self._facts.xids.append(LoggedXid(line, xid["bus"], int(xid["number"])))
            self._of_rank.setdefault(line.rank, []).append(line)
        for lines_of_rank in self._of_rank.values():
            self._explain(lines_of_rank)
        self._facts.raised = self._tracebacks.raised()
        self._forget_old_hangs()
        return self._facts

    def _begin_again(self, file: str) -> None:
        self._facts.forget(file)
        self._waiting = {rank: work for rank, work in self._waiting.items() if work.line.file != file}
        self._tracebacks.forget(file)
        self._of_rank = {rank: [line for line in lines if line.file != file] for rank, lines in self._of_rank.items()}

    def _world_size(self, line: LogLine) -> None:
        if (found := _WORLD_SIZE.search(line.text)) is not None:
            self._facts.world_size = max(self._facts.world_size, int(next(filter(None, found.groups()))))

    # -- torch's watchdog -----------------------------------------------------------------------------------------

    def _watchdog(self, line: LogLine) -> None:
        text, facts = line.text, self._facts
        if _ALARM.search(text) is not None:
            facts.with_watchdogs.add(line.file)
        rank, group = line.rank, _group_of(text)
        if rank is None and (old := _OLD_RANK.search(text)) is not None:  # torch before 2.2
            rank = int(old[1])
        call = _CALL.match(text)
        if "Stack trace of the failed collective" in text:
            self._stack_of = rank
        elif call is None:
            self._stack_of = None
        elif self._stack_of is not None and is_of_script(call["file"]):
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
