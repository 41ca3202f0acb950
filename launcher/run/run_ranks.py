"""Finds the ranks below the command, and how each ends, in the scratch folder, and reports them to the node agent."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...core.host import host_name, stat_fields
from ...core.identity import is_rank, number_of_process
from ...core.recorder.layout import HeadField, file_name
from ...core.recorder.reader import NotReady, RecorderReader
from ...core.recorder.run_folder import LATER_PROGRAMS, PROCESSES, RANKS, pid_of_file, tell_unwatched
from ...core.wire.pipe import WorkersEnded, WorkersStarted

# A process that somebody else started: when it ends, and with which code.

_INFO = struct.Struct("=QQ11Ii")
"""struct pidfd_info of linux/pidfd.h: mask, control group, eleven ids, wait status"""
_HAS_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
"""ioctl PIDFD_GET_INFO. From Linux 6.15 on it gives the status of a process that was waited for already."""


class WatchedRankProcess:
    """`pid` is 0 for one that had ended before it was seen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = -1
        self._status: int | None = None
        self.ended = threading.Event()
        try:
            self._fd = os.pidfd_open(pid)
        except OSError:
            self.pid = 0
            self.ended.set()
        else:
            threading.Thread(target=self._wait, daemon=True, name=f"gpuwatch-{pid}").start()

    def code(self) -> int | None:
        """Its exit code, negative for a signal; None if that cannot be known any more."""
        return os.waitstatus_to_exitcode(self._status) if self._status is not None else None

    def _wait(self) -> None:
        """Runs in a thread of its own, since the parent may reap the status at once."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.poll()
        with suppress(OSError, ValueError, IndexError):  # the last field, as long as its parent has not waited for it
            fields = stat_fields(Path(f"/proc/{self.pid}"))
            self._status = int(fields[49]) if fields[0] == "Z" else None
        if self._status is None:
            data = bytearray(_INFO.pack(_HAS_EXIT, *[0] * 13))
            with suppress(OSError):
                fcntl.ioctl(self._fd, _GET_INFO, data)
                mask, *_, status = _INFO.unpack(data)
                self._status = int(status) if mask & _HAS_EXIT else None
        self.ended.set()

    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Let go of it, if it has ended."""
        if self.pid and self.ended.is_set():
            os.close(self._fd)


_BY_OTHERS = (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT)
"""How ranks are ended."""
_LAST_END_S = 2.0
"""How long after the command's end the end of a process that it has waited for may be seen."""


@dataclass
class _RunRank:
    rank: int
    attempt: int
    pid: int
    process: WatchedRankProcess
    ended: bool = False


class _RecorderHead(NamedTuple):
    """What a recorder says of its process."""

    rank: int
    attempt: int
    pid: int
    started_ns: int
    ran: bool
    """It has called a module, made an optimizer step, or met an overflow."""
    is_alone: bool
    """It trains, and nothing says that it is one of several."""


class HostRanks:
    """Those of this host. `tell` takes what the node agent is to hear."""

    def __init__(
        self, folder: Path, tell: Callable[[msgspec.Struct], None], ended: Callable[[int, int, int | None], None]
    ) -> None:
        """`ended` is called for each rank: attempt, rank, exit code."""
        self._folder = folder
        self._tell = tell
        self._told_end = ended
        self._ranks: dict[Path, _RunRank] = {}
        self._processes: dict[int, WatchedRankProcess] = {}
        """By process id: those that may become a rank."""
        self._taken: set[Path] = set()
        """Recorders of processes that have become ranks, or are in the report as processes that are none."""
        self._last_end = 0.0
        """How long ends are waited for, once the command has ended."""
        self.any_failed = False
        """A rank has ended badly."""
        self.stopping = False
        """The command has ended, or is being ended: its ranks end for that reason."""

    def has(self, pid: int) -> bool:
        """Whether a process is a rank."""
        return any(rank.process.pid == pid for rank in self._ranks.values())

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return sorted(rank.rank for rank in self._ranks.values() if not rank.ended and is_rank(rank.rank))

    @property
    def heard(self) -> bool:
        """Whether there was any."""
        return bool(self._ranks)

    @property
    def number(self) -> int:
        """How many ranks there were, each once."""
        return len({rank.rank for rank in self._ranks.values() if is_rank(rank.rank)})

    def poll(self, own_codes: dict[int, int | None]) -> None:
        """Find new ranks, and ended ones. `own_codes`: the commands' exit codes by pid; None for one that runs."""
        if self._ranks and any(self._folder.glob(LATER_PROGRAMS)):
            pids = {rank.pid for rank in self._ranks.values() if is_rank(rank.rank)}
            self._adopt(lambda header: header.pid in pids)
        for path in sorted(self._folder.glob(RANKS)):
            if path not in self._ranks and (header := _read(path)) is not None:
                self._start(path, header.rank, header)
        self._end_programs()
        for path in self._folder.glob(PROCESSES):  # how they end is noticed from early on
            if (pid := pid_of_file(path)) not in self._processes and path not in self._taken:
                self._processes[pid] = WatchedRankProcess(pid)
        if not self._ranks:
            self._adopt(lambda header: header.is_alone)
        else:
            self._tell_of_processes(lambda header: header.is_alone or self._is_over(header.pid, own_codes))
        self._find_ended(own_codes)

    def _find_ended(self, own_codes: dict[int, int | None]) -> None:
        ended = []
        for rank in self._ranks.values():
            own, is_over = own_codes.get(rank.pid), rank.process.ended.is_set()
            if rank.pid in own_codes and rank.process.pid:  # whoever has started it says so, and knows it first
                is_over = own is not None
            if is_over and not rank.ended:
                ended.append((rank, own if own is not None else rank.process.code()))
        for rank, code in sorted(ended, key=lambda entry: entry[1] == -signal.SIGTERM):
            self._end(rank, code, rank.pid in own_codes)

    def last_look(self, own_codes: dict[int, int | None]) -> None:
        """The command has ended. If nothing became a rank for sure, what had a model was one."""
        self.poll(own_codes)
        if not self._ranks:
            self._adopt(lambda header: True)
            self.poll(own_codes)
        self._tell_of_processes(lambda header: True)
        # once: what the command has waited for has ended with it; what it has left behind is not waited for
        self._last_end = self._last_end or time.monotonic() + _LAST_END_S
        for rank in self._ranks.values():
            if not rank.ended and not is_rank(rank.rank):
                rank.process.ended.wait(max(0.0, self._last_end - time.monotonic()))
        self._find_ended(own_codes)

    def signal(self, number: int) -> None:
        """Send it to all that run."""
        for rank in self._ranks.values():
            if not rank.ended:
                rank.process.signal(number)

    def close(self) -> None:
        """Let go of their processes."""
        for process in (*(rank.process for rank in self._ranks.values()), *self._processes.values()):
            process.close()

    def _end_programs(self) -> None:
        """If a rank's process went on as another program (os.exec), the program is a later attempt: end the earlier."""
        last: dict[int, int] = {}
        for rank in self._ranks.values():
            last[rank.pid] = max(rank.attempt, last.get(rank.pid, 0))
        for rank in self._ranks.values():
            if rank.attempt < last[rank.pid] and not rank.ended:
                self._end(rank, 0, is_own=False)

    def _adopt(self, is_rank: Callable[[_RecorderHead], bool]) -> None:
        """Make ranks of processes that joined no group: for each rank that their environment names, the first to start.

        The report has the others as processes that are no rank.
        """
        found = []
        for path in self._folder.glob(PROCESSES):
            header = _read(path)
            if header is not None and is_rank(header):
                found.append(((not header.ran, header.started_ns), path, header))
        for _, path, header in sorted(found, key=lambda entry: entry[0]):
            with suppress(OSError):  # there is one
                (self._folder / file_name(header.rank, header.attempt)).hardlink_to(path)
                self._taken.add(path)

    def _is_over(self, pid: int, own_codes: dict[int, int | None]) -> bool:
        process = self._processes.get(pid)
        return own_codes.get(pid) is not None or process is None or process.ended.is_set()

    def _tell_of_processes(self, is_due: Callable[[_RecorderHead], bool]) -> None:
        """Report processes that ran a module and are no rank. Each is watched, and has its own row in the report."""
        for path in sorted(self._folder.glob(PROCESSES)):
            header = _read(path) if path not in self._taken else None
            if header is None or not header.ran or not is_due(header):
                continue
            self._taken.add(path)
            number = number_of_process(header.pid, host_name())
            own = self._folder / file_name(number, 0)
            try:
                own.hardlink_to(path)
                self._start(own, number, header)
            except FileExistsError:  # it has gone on as another program (os.exec)
                tell_unwatched(self._folder, header.pid, f"process {header.pid} (no rank) went on as another program")
            except OSError:  # it has just become a rank
                pass

    def _start(self, path: Path, number: int, header: _RecorderHead) -> None:
        process = self._processes.pop(header.pid, None) or WatchedRankProcess(header.pid)
        attempt = header.attempt if is_rank(number) else 0
        self._ranks[path] = _RunRank(number, attempt, header.pid, process)
        self._tell(WorkersStarted(attempt, {number: header.pid}))

    def _end(self, rank: _RunRank, code: int | None, is_own: bool) -> None:
        """Whoever started the ranks ends the others once one has failed: by SIGTERM, which nobody can tell from one
        that came from elsewhere, and then by others."""
        rank.ended = True
        stopped = code == -signal.SIGTERM and not is_own
        stopped = stopped or ((self.any_failed or self.stopping) and code in _BY_OTHERS)
        self.any_failed = self.any_failed or (bool(code) and not stopped)
        self._told_end(rank.attempt, rank.rank, code)
        self._tell(WorkersEnded(rank.attempt, {rank.rank: code}, [] if stopped else [rank.rank]))


def _read(path: Path) -> _RecorderHead | None:
    with suppress(OSError, NotReady), closing(RecorderReader(path)) as reader:
        trains = reader[HeadField.STEP] > 0 or reader.overflow_seen
        ran, is_alone = trains or reader[HeadField.BATCH] >= 0, trains and reader[HeadField.WORLD_SIZE] == 1
        return _RecorderHead(reader.rank, reader.attempt, reader.pid, reader[HeadField.STARTED_NS], ran, is_alone)
    return None
