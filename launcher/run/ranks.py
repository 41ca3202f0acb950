"""What has become a rank below the command, and how it ends: found in the scratch folder, told to the node agent."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...core.recorder.layout import Field, file_name
from ...core.recorder.reader import NotReady, RecorderReader
from ...core.recorder.run_folder import LATER_PROGRAMS, PROCESSES, RANKS
from ...core.wire.pipe import WorkersEnded, WorkersStarted
from .other_process import OtherProcess

_BY_OTHERS = (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT)
"""How ranks are ended."""


@dataclass
class _Rank:
    rank: int
    attempt: int
    pid: int
    process: OtherProcess | None
    """None if it had ended before it was seen."""
    ended: bool = False


@dataclass(frozen=True)
class _Header:
    """What a recorder says of its process."""

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    pid: int
    started_ns: int
    trains: bool
    """It has made an optimizer step, or met an overflow."""


class Ranks:
    """Those of this host. `tell` takes what the node agent is to hear."""

    def __init__(
        self, folder: Path, tell: Callable[[msgspec.Struct], None], ended: Callable[[int, int, int | None], None]
    ) -> None:
        """`ended` is told of each rank: attempt, rank, exit code."""
        self._folder = folder
        self._tell = tell
        self._told_end = ended
        self._ranks: dict[Path, _Rank] = {}
        self.any_failed = False
        """A rank has ended badly."""
        self.stopping = False
        """The command has ended, or is being ended: its ranks end for that reason."""

    def has(self, pid: int) -> bool:
        """Whether a process is a rank."""
        return any(rank.process is not None and rank.process.pid == pid for rank in self._ranks.values())

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return sorted(rank.rank for rank in self._ranks.values() if not rank.ended)

    @property
    def heard(self) -> bool:
        """Whether there was any."""
        return bool(self._ranks)

    def look(self, own_codes: dict[int, int | None]) -> None:
        """Find new ones, and those that have ended. `own_codes`: those of commands, by pid; None for one that runs."""
        if self._ranks and any(self._folder.glob(LATER_PROGRAMS)):
            pids = {rank.pid for rank in self._ranks.values()}
            self._adopt(lambda header: header.pid in pids)
        for path in sorted(self._folder.glob(RANKS)):
            if path not in self._ranks and (header := _read(path)) is not None:
                self._start(path, header)
        self._end_programs()
        if not self._ranks:
            self._adopt(lambda header: header.trains and header.world_size == 1)
        ended = [(rank, self._code(rank, own_codes)) for rank in self._ranks.values() if _has_ended(rank, own_codes)]
        for rank, code in sorted(ended, key=lambda entry: entry[1] == -signal.SIGTERM):
            self._end(rank, code, rank.pid in own_codes)

    def last_look(self, own_codes: dict[int, int | None]) -> None:
        """The command has ended. If nothing became a rank for sure, what had a model was one."""
        self.look(own_codes)
        if not self._ranks:
            self._adopt(lambda header: True)
            self.look(own_codes)

    def signal(self, number: int) -> None:
        """Send it to all that run."""
        for rank in self._ranks.values():
            if not rank.ended and rank.process is not None:
                rank.process.signal(number)

    def close(self) -> None:
        """Let go of their processes."""
        for rank in self._ranks.values():
            if rank.process is not None:
                rank.process.close()

    def _end_programs(self) -> None:
        """Where a rank's process has gone on as another program (os.exec), that one is a later attempt of the rank."""
        last: dict[int, int] = {}
        for rank in self._ranks.values():
            last[rank.pid] = max(rank.attempt, last.get(rank.pid, 0))
        for rank in self._ranks.values():
            if rank.attempt < last[rank.pid] and not rank.ended:
                self._end(rank, 0, is_own=False)

    def _adopt(self, is_rank: Callable[[_Header], bool]) -> None:
        """Of processes that joined no group: one for each rank that their environment speaks of, the first to start."""
        found = []
        for path in self._folder.glob(PROCESSES):
            header = _read(path)
            if header is not None and is_rank(header):
                found.append((header.started_ns, path, header))
        for _, path, header in sorted(found, key=lambda entry: entry[0]):
            with suppress(OSError):  # there is one
                (self._folder / file_name(header.rank, header.attempt)).hardlink_to(path)

    def _start(self, path: Path, header: _Header) -> None:
        process = None
        with suppress(OSError):
            process = OtherProcess(header.pid)
        self._ranks[path] = _Rank(header.rank, header.attempt, header.pid, process)
        self._tell(WorkersStarted(header.attempt, {header.rank: header.pid}, {header.rank: header.local_rank}))

    def _code(self, rank: _Rank, own_codes: dict[int, int | None]) -> int | None:
        code = own_codes.get(rank.pid)
        return rank.process.code() if code is None and rank.process is not None else code

    def _end(self, rank: _Rank, code: int | None, is_own: bool) -> None:
        """Whoever started the ranks ends the others once one has failed: by SIGTERM, which nobody can tell from one
        that came from elsewhere, and then by others."""
        rank.ended = True
        stopped = code == -signal.SIGTERM and not is_own
        stopped = stopped or ((self.any_failed or self.stopping) and code in _BY_OTHERS)
        self.any_failed = self.any_failed or (bool(code) and not stopped)
        self._told_end(rank.attempt, rank.rank, code)
        self._tell(WorkersEnded(rank.attempt, {rank.rank: code}, [] if stopped else [rank.rank]))


def _has_ended(rank: _Rank, own_codes: dict[int, int | None]) -> bool:
    """Whether it has since the last look; of a command, whoever has started it says so, and knows it first."""
    if rank.ended or rank.process is None:
        return not rank.ended
    if rank.pid in own_codes:
        return own_codes[rank.pid] is not None
    return rank.process.has_ended()


def _read(path: Path) -> _Header | None:
    """None if it is not ready, or gone."""
    with suppress(OSError, NotReady), closing(RecorderReader(path)) as reader:
        return _Header(
            reader.rank,
            reader.local_rank,
            reader[Field.WORLD_SIZE],
            reader.attempt,
            reader.pid,
            reader[Field.STARTED_NS],
            reader[Field.STEP] > 0 or reader.overflow_seen,
        )
    return None
