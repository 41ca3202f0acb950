"""The ranks of a node as its agent watches them: what their recorders hold, how they ended, which rest or are slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from ...core.events.agent_events import RankLook, WorkerExit
from ...core.identity import is_rank
from ...core.recorder.run_folder import KEPT_ATTEMPTS, PROCESSES, pid_of_file
from ...core.wire import messages, pipe
from .memory_group import MemoryWatch
from .process_ends import ProcessEnds
from .rank_pages import TracedBatches
from .rank_stalls import StallWatch
from .rank_watch import RankWatch
from .slow_rank import SlowRankWatch


class PutMessage(Protocol):
    """Puts a message into the agent's outbox and spool. None: there is nothing to send."""

    def __call__(self, body: messages.AgentBody | None, *, needed: bool = False) -> None:
        """`needed`: it is one of the last pages of its rank."""


class NodeRanks:
    """All ranks of all attempts that a node still has. `now` is monotonic time in seconds."""

    def __init__(self, config: pipe.AgentConfig, put: PutMessage, on_stall: Callable[[float], None]) -> None:
        """`on_stall`: called with the time when a stall is told, so that what the node does just then is sent, too."""
        self._folder, self._hello = Path(config.recorder_dir), config.hello
        self._put, self._on_stall = put, on_stall
        self._watches: dict[tuple[int, int], RankWatch] = {}
        """By (rank, attempt)."""
        self.traces = TracedBatches(config.hello.max_nodes)
        self.ends = ProcessEnds()
        self._memory = MemoryWatch()
        self._stalls = StallWatch(self._folder, config.hang_timeout_s)
        self._slow = SlowRankWatch(self._folder)
        self._shown: list[RankLook] = []
        self._told: set[tuple[int, int]] = set()

    def close(self) -> None:
        """Let go of the recorders."""
        for watch in self._watches.values():
            watch.close()
        self.ends.close()
        self._stalls.close()

    @property
    def running(self) -> list[RankWatch]:
        """Those whose end was not heard."""
        return [watch for watch in self._watches.values() if not watch.ended]

    @property
    def _of_ranks(self) -> list[RankWatch]:
        """A process that is no rank may rest for as long as it likes: it waits for its children."""
        return [watch for watch in self._watches.values() if is_rank(watch.rank)]

    def pids(self) -> list[int]:
        """Process ids of the ranks, and of processes that could have become ranks."""
        others = [pid_of_file(path) for path in self._folder.glob(PROCESSES)]
        return [*(watch.pid for watch in self._watches.values()), *others]

    def pids_by_rank(self) -> list[tuple[int, int]]:
        """(rank, process id) of those that run."""
        return [(watch.rank, watch.pid) for watch in self.running]

    # -- their begin and their end ------------------------------------------------------------------------------

    def started(self, message: pipe.WorkersStarted) -> None:
        """An attempt has started."""
        # a job that restarts often would fill the memory with recorders that were read
        for key, watch in list(self._watches.items()):
            if watch.attempt < message.attempt - KEPT_ATTEMPTS and watch.ended:
                watch.remove()
                del self._watches[key]
        for rank, pid in message.pids.items():
            key, traced = (rank, message.attempt), self._hello.trace_batches
            self._watches[key] = RankWatch(
                self._folder, rank, message.attempt, pid, traced, len(message.pids), self.traces
            )
            self.ends.watch(key, pid)
            self._memory.watch(key, pid)

    def ended(self, message: pipe.WorkersEnded, now: float) -> None:
        """Ranks have ended, as their launch says."""
        for rank, code in message.codes.items():
            by = "itself" if rank in message.failed or code == 0 else "torchrun"
            self._end(rank, message.attempt, code, by, now, message.looks.get(rank))

    def end_all(self, now: float) -> None:
        """The job is over: torchrun has ended those whose end was not heard."""
        for watch in self.running:
            self._end(watch.rank, watch.attempt, None, "torchrun", now)

    def end_without_launch(self, now: float) -> bool:
        """The launch was killed: the ranks whose process has not ended may run on, how the others ended is unknown.

        Whether any runs on.
        """
        runs_on = False
        for watch in self.running:
            by = "unknown" if self.ends.has_ended((watch.rank, watch.attempt), watch.pid) else "running"
            runs_on = runs_on or by == "running"
            self._end(watch.rank, watch.attempt, None, by, now)
        return runs_on

    def told_before(self, ends: Iterable[tuple[int, int]]) -> None:
        """(attempt, rank) of ends that an agent before this one has reported."""
        self._told.update(ends)

    def _end(
        self, rank: int, attempt: int, code: int | None, by: str, now: float, look: pipe.LastLook | None = None
    ) -> None:
        watch = self._watches.get((rank, attempt))
        if watch is not None and watch.was_removed and (attempt, rank) in self._told:
            watch.ended = True
        if watch is not None and not watch.ended:
            for slow in self._slow.told(watch):
                self._put(messages.EventMessage(slow))
            for body in watch.end(code, by, now, look):
                self._put(self._with_what_ranks_cannot_see(body), needed=True)

    def _with_what_ranks_cannot_see(self, body: messages.AgentBody) -> messages.AgentBody:
        """Add when a rank ended, and what the kernel did for lack of memory, as a SIGKILL may be another's."""
        if not isinstance(body, messages.EventMessage) or not isinstance(body.event, WorkerExit):
            return body
        key = body.event.where.rank, body.event.where.attempt
        alive_ns, ended_ns = self.ends.when_ns(key)
        if body.event.runs_on:
            return messages.EventMessage(replace(body.event, alive_ns=time.time_ns()))
        if body.event.ended_ns:  # when a fatal signal came
            alive_ns = ended_ns = body.event.ended_ns
        ended_ns = ended_ns or time.time_ns()
        still_s = body.event.still_s
        if body.event.by == "itself":  # until now
            still_s = max(0.0, still_s - (time.time_ns() - ended_ns) / 1e9)
        exit_ = replace(body.event, alive_ns=alive_ns, ended_ns=ended_ns, still_s=still_s)
        if body.event.code not in (0, None):
            lack = self._memory.lack_of(key)
            exit_ = replace(exit_, memory_kills=lack.kills, memory_limit=lack.limit, memory_peak=lack.peak)
            exit_ = replace(exit_, resident=self.ends.resident(key))
        return messages.EventMessage(exit_)

    # -- while they run -----------------------------------------------------------------------------------------

    def poll(self, now: float, *, over: bool) -> None:
        """Put what their recorders have, and what is seen of those that rest or are slow. `over`: the job has ended."""
        for watch in self._watches.values():
            for body in watch.poll(now):
                self._put(body)
        if over:
            return
        for stalled in self._stalls.stalled(self._of_ranks, now):
            self._put(messages.EventMessage(stalled))
            self._on_stall(now)
        for slow in self._slow.turn(self._of_ranks, now):
            self._put(messages.EventMessage(slow))
        for look in self._stalls.seen(now):
            if look.number == messages.SHOWN_LOOK:
                self._shown.append(look)
            else:
                self._put(messages.EventMessage(look))

    def shown_looks(self) -> list[RankLook]:
        """What viewers have asked for, once."""
        shown, self._shown = self._shown, []
        return shown

    def want(self, message: messages.WantedBatch, now: float) -> None:
        """The collector asks for a batch."""
        for watch in self._watches.values():
            watch.want(message, now)

    def inspect(self, number: int, now: float) -> None:
        """The collector asks what the ranks do."""
        if number != messages.SHOWN_LOOK:
            for body in self._unjudged(now):
                self._put(body, needed=True)
            self._on_stall(now)
        self._stalls.inspect(self._of_ranks, number, now)

    def watch_slow(self, message: messages.WatchSlowRank) -> None:
        """The collector asks what a slow rank does."""
        self._slow.ask(message)

    def _unjudged(self, now: float) -> Iterator[messages.AgentBody]:
        """Before anything is said of a hang: a rank that waits cannot tell of the bad value that it has computed."""
        for watch in self.running:
            yield from watch.unjudged(now)
