"""When the processes of a node's ranks ended, by the host's own clock, and what they have left.

torchrun looks ten times a second whether a rank has ended. Two ranks that fail 50 ms apart then end at the same time.
A process that was killed takes a while to end: its memory is freed first, for tens of milliseconds. The kernel takes
the memory from the process before it frees it (exit_mm() in kernel/exit.c), and /proc/PID/statm is zero from then on.
So the agent reads statm in each turn. A pidfd (pidfd_open(2), Linux 5.3) wakes it when the process is gone.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from ...core.codes import RANK_OVERFLOW, Code, coded
from ...core.events.alarms import Anomaly
from ...core.frames import module_text
from ...core.recorder.layout import file_name
from ...core.recorder.reader import NotReady, RecorderReader
from ...core.recorder.run_folder import RUN_VARIABLE
from ...core.settings import VARIABLE
from ...core.text import command_for, ranks_text, shown_name
from ...core.wire.pipe import JobResult

RankKey = tuple[int, int]
"""(rank, attempt)"""


_PAGE = os.sysconf("SC_PAGE_SIZE")


class _WatchedProcess(NamedTuple):
    key: RankKey
    pidfd: int
    statm: int


class ProcessEnds:
    """Notes between which two looks each process that it watches has begun to end."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        """Readable when a process is gone. Then call `look`."""
        self._watched: list[_WatchedProcess] = []
        self._looked_ns = time.time_ns()
        self._ended: dict[RankKey, tuple[int, int]] = {}
        self._resident: dict[RankKey, int] = {}

    def watch(self, key: RankKey, pid: int) -> None:
        """Watch a process from now on. One that cannot be watched, or is gone already, gets no time of its end."""
        with suppress(OSError, AttributeError):  # Python has the call only where Linux had it when Python was built
            pidfd = os.pidfd_open(pid)
            try:
                self._watched.append(_WatchedProcess(key, pidfd, os.open(f"/proc/{pid}/statm", os.O_RDONLY)))
            except OSError:
                os.close(pidfd)
                raise
            self._epoll.register(pidfd, select.EPOLLIN)

    def poll(self) -> None:
        """Note which have begun to end since the last look."""
        now_ns = time.time_ns()
        for watched in list(self._watched):
            size, resident = _pages(watched.statm)
            if size:
                self._resident[watched.key] = max(resident * _PAGE, self._resident.get(watched.key, 0))
                continue
            self._ended[watched.key] = (self._looked_ns, now_ns)
            self._watched.remove(watched)
            _close(watched)  # the epoll forgets it, too
        self._looked_ns = now_ns

    def when_ns(self, key: RankKey) -> tuple[int, int]:
        """(when the rank's process was last seen alive, when it was seen to end); (0, 0) if that is not known."""
        self.poll()
        return self._ended.get(key, (0, 0))

    def has_ended(self, key: RankKey, pid: int) -> bool:
        """Whether the rank's process has ended, or SIGKILL has reached it and it ends now."""
        self.poll()
        with suppress(OSError):  # it is gone
            return key in self._ended or is_over(Path(f"/proc/{pid}/status").read_text())
        return True

    def resident(self, key: RankKey) -> int:
        """The most bytes that the rank's process was seen to have in memory; 0 if that is not known."""
        return self._resident.get(key, 0)

    def close(self) -> None:
        """Let go of all processes."""
        for watched in self._watched:
            _close(watched)
        self._watched.clear()
        self._epoll.close()


def _pages(statm: int) -> tuple[int, int]:
    """(all, in memory); (0, 0) of a process that is ending. (man 5 proc)"""
    with suppress(OSError, ValueError):  # it is gone
        size, resident, *_ = os.pread(statm, 128, 0).split()
        return int(size), int(resident)
    return 0, 0


_KILLED = 1 << signal.SIGKILL - 1


def is_over(status: str) -> bool:
    """Whether a process has ended but for its parent's look, or SIGKILL has reached it. `status`: /proc/PID/status."""
    of = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    pending = int(of["SigPnd"], 16) | int(of["ShdPnd"], 16)
    return of["State"][0] in "ZX" or bool(pending & _KILLED)


def _close(watched: _WatchedProcess) -> None:
    os.close(watched.pidfd)
    os.close(watched.statm)


# What a command has left when its `gpuwatch run` was killed: asked to end, and ended after a while.
#
# The kernel sends the command SIGTERM then. What the command itself has started may hear nothing of it: the children of
# a shell, ranks that a shell or Ray has started, a Python that is about to become a rank.

GRACE_S = 30.0
"""From SIGTERM to SIGKILL, as torchrun has it."""
_GIVE_UP_S = 40.0
"""What not even SIGKILL ends by then, such as a process in a driver, is left to itself."""
_LOOK_S = 0.5


def processes_with(variable: str, is_meant: Callable[[str], bool]) -> Iterator[psutil.Process]:
    """What runs on this host with such a value in its environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is somebody else's
            if is_meant(process.environ().get(variable, "")) and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def session_of(pid: int) -> int | None:
    """The session of a process; None if it has ended.

    0 is a session, too: one whose leader is outside of this PID namespace, as a container's first session may be.
    """
    with suppress(OSError):
        return os.getsid(pid)
    return None


class RunOrphans:
    """The processes of one run: they have its variable, and are in its session or are ranks.

    A process that has left the session and is no rank is a service that was meant to stay.
    """

    def __init__(self, scratch: Path, session: int | None, ranks: Callable[[], Collection[int]], now: float) -> None:
        """`session` is the run's, None if unknown; `ranks` gives the process ids of its ranks."""
        self._scratch = str(scratch)
        self._session = session
        self._ranks = ranks
        self._began = now
        self._next_look = now
        self._asked: set[int] = set()

    def are_gone(self, now: float) -> bool:
        """Look, and ask those to end that were not asked yet. True once none is left, or nothing more can be done."""
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        left = self._find()
        for process in left:
            with suppress(psutil.Error):
                if now - self._began > GRACE_S:
                    process.kill()
                elif process.pid not in self._asked:
                    process.terminate()
                    self._asked.add(process.pid)
        return not left or now - self._began > _GIVE_UP_S

    def _find(self) -> list[psutil.Process]:
        ranks = set(self._ranks())
        return [
            process
            for process in processes_with(RUN_VARIABLE, self._scratch.__eq__)
            if process.pid in ranks or (self._session is not None and session_of(process.pid) == self._session)
        ]


# Processes that ranks have forked and that have outlived them, such as a data loader's worker that is stuck.
#
# The launch names them to the user and leaves them alone: one of them may be writing a checkpoint.

PATIENCE_LEFT_BEHIND_S = 8.0
"""torch's own workers look every five seconds whether their rank is still there."""
_MOST_LEFT = 8


def tell_left_behind(scratch: Path, say: Callable[[str], object], patience_s: float = PATIENCE_LEFT_BEHIND_S) -> None:
    """Call it after all ranks have ended: names the processes that they left, if these do not end soon."""
    # what runs with the environment that this launch has given to its ranks: a copy of a process keeps that
    there = list(processes_with(VARIABLE, lambda value: str(scratch) in value))
    _, left = psutil.wait_procs(there, timeout=patience_s) if there else ([], [])
    if left:
        pids = ", ".join(str(process.pid) for process in left[:_MOST_LEFT]) + (
            ", ..." if len(left) > _MOST_LEFT else ""
        )
        many = len(left) > 1
        text = (
            f"{len(left)} process{'es' if many else ''} that a rank had started {'have' if many else 'has'} outlived "
            f"the rank (a stuck data loader worker, for example) and may hold memory: kill {pids}"
        )
        say(coded(text, Code.LEFT_BEHIND))


# The overflows that this node's ranks recorded: the launch's own evidence, even if its agent, its collector or its disk
# fails.


class SeenOverflows:
    """By (attempt, rank): the first anomaly, or None where a rank says no more than that there was one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[tuple[int, int], Anomaly | None] = {}

    def read(self, attempt: int, codes: dict[int, int | None]) -> None:
        """The ranks of this attempt have ended with these codes: read their recorders."""
        for rank, code in codes.items():
            seen, first = code == RANK_OVERFLOW, None  # a script may have that code of its own: a recorder tells
            recorder = self._folder / file_name(rank, attempt)
            with suppress(OSError, NotReady), closing(RecorderReader(recorder)) as reader:
                seen, first = reader.overflow_seen, reader.first_anomaly()
            if seen:
                self._seen[attempt, rank] = first

    def is_looked_into(self, attempt: int, running: Iterable[int]) -> bool:
        """Whether one of these ranks is yet to say which operation made its overflow, before it ends the job."""
        for rank in running:
            recorder = self._folder / file_name(rank, attempt)
            with suppress(OSError, NotReady), closing(RecorderReader(recorder)) as reader:
                first = reader.first_anomaly()
                if first is not None and first.looks and not reader.abort:
                    return True
        return False

    @property
    def sentence(self) -> str:
        """Who saw one, and the one of the earliest batch; "" where there is none. Which was first, it cannot tell."""
        if not self._seen:
            return ""
        attempt = min(number for number, _ in self._seen)
        ranks = [rank for number, rank in self._seen if number == attempt]
        known = [found for (number, _), found in self._seen.items() if number == attempt and found is not None]
        if not known:
            return f"{ranks_text(ranks)} saw an overflow; the place is unknown"
        first = min(known, key=lambda anomaly: (anomaly.where.batch, anomaly.where.collectives, anomaly.where.rank))
        module = module_text(first.module, first.cls)
        place = f"{first.value} in {shown_name(first.role)} of {module}, {first.phase} of batch {first.where.batch}"
        if len(ranks) == 1:
            return f"{ranks_text(ranks)} saw an overflow: {place}"
        return f"{ranks_text(ranks)} saw an overflow; in the earliest batch, on rank {first.where.rank}: {place}"


def where_it_is(verdict: JobResult | None) -> str:
    """Where to find an overflow that the verdict lacks, as a sentence."""
    if verdict is not None and verdict.overflow_in:
        return f"no report shows it yet; make one from this node's spool with: {command_for(Path(verdict.overflow_in))}"
    return "the report lacks this overflow: its event was lost in transit"
