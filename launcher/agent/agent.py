"""The node agent: one small process per node between the recorders of its ranks and the collector. Imports no torch.

    launch --JSON lines--> agent --ZeroMQ, CURVE--> collector
    recorders (files) ------^

It never blocks on the network: what the collector has not acknowledged waits in the outbox, and all that it sends is in
its spool as well, for a collector that never comes back. An agent that has ended is started again by its launch: the
recorders are files, so it reads them from the beginning, and nothing is reported twice.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

import zmq
from msgspec.structs import replace

from ...core import host
from ...core.codes import Code, ExitCode, VerdictKind
from ...core.errors import GpuwatchError
from ...core.events.agent_events import WorkerExit
from ...core.events.alarms import Anomaly
from ...core.events.log_entries import Event
from ...core.events.node_events import AttemptNodes, GpuCounters, GpuHealth, GpuXid, NodeSignal
from ...core.events.preflight_events import PreflightResult
from ...core.gpu.nvml_child import KILLED_S
from ...core.guest.tell import flush_streams
from ...core.host import LineReader, OwnClock
from ...core.recorder.layout import file_name
from ...core.recorder.run_folder import (
    adopt_scratch,
    keep_rescued,
    remove_scratch,
    tell_answered,
    tell_unanswered,
)
from ...core.text import command_for, from_json
from ...core.wire import messages, pipe
from ...core.wire.beat import NodeBeat, closest_modules, pack_list
from ...core.wire.keys import agent_name
from ...core.wire.spool import SUFFIX, SpoolWriter, keep_spools, read_spool
from .collector_link import CollectorLink, ForgottenMessages
from .gpus import GpuWatch
from .node_ranks import NodeRanks
from .process_ends import RunOrphans, session_of
from .rank_watch import MOST_HOT
from .telemetry import NodeTelemetry

LOOK_S = 0.05
"""How often it looks whether a rank's process has begun to end."""
TURN_S = 0.1
"""How often it reads the recorders, where nothing else wakes it up."""
NEVER_CAME_S = 15.0
"""How long the agent waits, after the job has ended, for a collector that has never answered its launch."""
WAITING_S = 5.0
"""How often, at the end, the agent reports to its launch that it is alive."""

_THE_WORST_LAST = (ExitCode.CLEAN, ExitCode.SCRIPT_FAILED, ExitCode.LOST, ExitCode.OVERFLOW, ExitCode.PREFLIGHT_FAILED)
_M_MMAP_THRESHOLD = -3
"""mallopt(3)"""


class NodeAgentLoop:
    """The agent of one node. `now` is monotonic time in seconds."""

    def __init__(
        self,
        config: pipe.AgentConfig,
        to_launch: IO[bytes],
        *,
        gpus: GpuWatch | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """`gpus` and `context` are made here unless they are given: many agents of one process share a context."""
        self._config = config
        self._tell = partial(pipe.write_line, to_launch)
        self._folder = Path(config.recorder_dir)
        self._identity = f"{config.identity or secrets.token_hex(16)}.{config.life}".encode()
        self._id = agent_name(self._identity)
        self._spool = SpoolWriter(self._folder / f"{self._id}{SUFFIX}")
        self._time = OwnClock()
        self._now = self._time.now()
        self._link = CollectorLink(config, self._identity, self._tell, self._now, context)
        self.outbox = self._link.outbox
        self._gpus = gpus if gpus is not None else GpuWatch(self._now)
        folders = {"runs-dir": Path(config.spool_dir), "scratch": self._folder}
        self._telemetry = NodeTelemetry(config.telemetry_s, folders, self._gpus)
        self.ranks = NodeRanks(config, self._put, lambda now: self._put(self._telemetry.told(now)))
        self._done: pipe.LaunchDone | None = None
        self._signal_told = False
        self._said_goodbye = False
        self._launch_gone = False
        self._launch_session = session_of(os.getppid())
        self._orphans: RunOrphans | None = None
        """What the launch has left behind, once it was killed."""
        self._final: pipe.JobResult | None = None
        self._worst = ExitCode.CLEAN
        self._last_waiting = 0.0
        self._hello = replace(config.hello, agent=self._id, host=host.host_name(), cwd=str(Path.cwd()))
        if config.collector and not self._hello.run:
            tell_unanswered(self._folder, config.collector)
        self._put(self._hello)
        for spool in self._spools()[:-1]:
            with suppress(GpuwatchError):
                for message in read_spool(spool):
                    if self._is_only_there(message.body):
                        self._put(message.body)

    def _is_only_there(self, body: messages.AgentBody) -> bool:
        """What no recorder has any more is in the spool of an agent before this one, and nowhere else.

        That is what it knows of the attempts, of the GPUs and of the node, and the ranks whose recorders were freed.
        """
        if isinstance(body, messages.TelemetryMessage):
            return True
        if isinstance(body, messages.EventMessage) and isinstance(
            body.event, AttemptNodes | GpuXid | GpuCounters | GpuHealth
        ):
            return True
        ranks = messages.ranks_of(body)
        if isinstance(body, messages.EventMessage) and isinstance(body.event, WorkerExit):
            self.ranks.told_before(ranks)
        return bool(ranks) and not any((self._folder / file_name(rank, attempt)).exists() for attempt, rank in ranks)

    def _spools(self) -> list[Path]:
        """The spools of all agents of this launch, in their order; the last is ours."""
        lives = [self._folder / f"{messages.node_of(self._id)}.{life}{SUFFIX}" for life in range(self._config.life + 1)]
        return [path for path in lives if path.exists()]

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the verdict arrives, or nobody is left to give one."""
        launch = LineReader(sys.stdin.fileno())
        collector = self._link.fd
        poller = select.poll()
        for fd in (collector, launch.fd, self.ranks.ends.fd, self._gpus.fd):
            if fd is not None:
                poller.register(fd, select.POLLIN)
        try:
            due = self._now
            while not self.finished(self._now):
                ready = dict(poller.poll(int(LOOK_S * 1000)))
                now = self._now = self._time.now()
                self.ranks.ends.poll()
                if not ready and now < due:
                    continue
                due = now + TURN_S - LOOK_S / 2
                if launch.fd in ready:
                    for line in launch.lines():
                        self.hear_launch(line, now)
                    if launch.closed:
                        poller.unregister(launch.fd)
                        self._launch_closed(now)
                self._poll_gpus(poller, ready, now)
                self.turn(now, heard=collector in ready)
            self._conclude()
        finally:
            self.close()
            if self._launch_gone:
                keep_rescued(self._folder)
                remove_scratch(self._folder)

    def turn(self, now: float, *, heard: bool = True) -> None:
        """Hear the collector, read the ranks, send every due message. `heard`: the socket's descriptor is readable."""
        self._now = now
        for message in self._link.on_message(now, readable=heard, may_start_over=not self._launch_gone):
            self._hear_collector(message, now)
        self.ranks.poll(now, over=self._done is not None)
        if self._done is None:
            self._telemetry.turn(self.ranks.pids_by_rank, now)
        if self._orphans is not None and self._orphans.are_gone(now):
            self._orphans = None
            self._conclude_for_launch(now)
        self._say_goodbye(now)
        self._link.send(self._beat, now)
        if self._done is not None and now - self._last_waiting > WAITING_S:
            self._last_waiting = now
            self._tell(pipe.VerdictWait())

    def close(self) -> None:
        """Let go of the recorders, the child and the socket."""
        self.ranks.close()
        self._gpus.close(KILLED_S)
        self._spool.close()
        self._link.close()

    def finished(self, now: float) -> bool:
        """Whether the verdict is there, or nobody is left to give one."""
        if self._done is None:
            return False
        if self._final is not None or self._link.refused:
            return True
        if not self._config.collector:
            return self._said_goodbye
        silent = now - max(self._link.heard, self._done_at)
        answered = self._link.welcomed or bool(self._config.hello.run)  # this agent, or one before it
        return silent > (messages.VERDICT_PATIENCE_S if answered else NEVER_CAME_S)

    # -- the launch ---------------------------------------------------------------------------------------------

    def hear_launch(self, line: bytes, now: float) -> None:
        """A line of the launch's pipe."""
        message: pipe.ToAgent = from_json(line, pipe.ToAgent)
        if isinstance(message, pipe.WorkersStarted):
            if len(message.hosts) > 1:
                self._put(messages.EventMessage(AttemptNodes(message.attempt, message.name, message.hosts)))
            self.ranks.started(message)
        elif isinstance(message, pipe.WorkersEnded):
            self.ranks.ended(message, now)
        elif isinstance(message, pipe.LaunchDone):
            self._launch_done(message, now)

    def _launch_done(self, done: pipe.LaunchDone, now: float) -> None:
        if self._done is not None:
            return
        self.ranks.end_all(now)
        self._tell_signal(done)
        self._done = done
        self._done_at = now
        if self._final is not None:  # it was over without this node
            self._tell(self._final)
        self._put(self._telemetry.ended())
        self._gpus.end(now)
        if done.outcome == "failed":
            self._saw(ExitCode.SCRIPT_FAILED)

    def _launch_closed(self, now: float) -> None:
        """The launch was killed. What torchrun has started may run on; what a command leaves behind is ended."""
        if self._done is None:
            self._launch_gone = True
            adopt_scratch(self._folder)
            if self._config.ends_ranks:
                self._tell_signal(pipe.LaunchDone("failed", int(signal.SIGKILL)))
                self._orphans = RunOrphans(self._folder, self._launch_session, self.ranks.pids, now)
            else:
                self._conclude_for_launch(now)

    def _conclude_for_launch(self, now: float) -> None:
        runs_on = self.ranks.end_without_launch(now)
        self._launch_done(pipe.LaunchDone("failed", int(signal.SIGKILL), runs_on=runs_on), now)

    def _tell_signal(self, done: pipe.LaunchDone) -> None:
        """When it came: what ranks say after it, they say because of it."""
        if done.signal and not self._signal_told:
            self._signal_told = True
            self._put(
                messages.EventMessage(
                    NodeSignal(done.signal, time.time_ns(), done.reason, done.down_nodes, done.told_by)
                )
            )

    def _say_goodbye(self, now: float) -> None:
        """Send the last message. It waits for the GPUs' last counters, unless NVML does not answer."""
        if self._done is not None and not self._said_goodbye and self._gpus.settled(now):
            self._said_goodbye = True
            done = self._done
            self._put(messages.NodeBye(done.outcome, done.signal, done.note, done.unwatched, done.error, done.runs_on))

    def _poll_gpus(self, poller: select.poll, ready: dict[int, int], now: float) -> None:
        fd = self._gpus.fd
        if fd is not None and fd in ready:
            self._gpus.on_message()
        self._gpus.tick(now)
        if fd is not None and self._gpus.fd is None:
            poller.unregister(fd)
        for event in self._gpus.events():
            self._put(messages.EventMessage(event))

    # -- what it sends ------------------------------------------------------------------------------------------

    def _put(self, body: messages.AgentBody | None, *, needed: bool = False) -> None:
        """None: there is nothing to send. `needed`: it is one of the last pages of its rank."""
        if body is None:
            return
        if isinstance(body, messages.EventMessage):
            self._note(body.event)
        self._spool.append(
            self.outbox.put(body, needed=needed),
            is_page=isinstance(body, messages.PageMessage | messages.RankHistoryMessage | messages.TelemetryMessage),
        )

    def _note(self, event: Event) -> None:
        """What this node would exit with, should the collector never answer."""
        if isinstance(event, Anomaly):
            self.outbox.need(event.where.attempt, event.where.batch)
            self._gpus.anomaly(self._now)
            self._put(self._telemetry.told(self._now))
            self._saw(ExitCode.OVERFLOW)
        elif isinstance(event, PreflightResult) and event.stops:
            self._saw(ExitCode.PREFLIGHT_FAILED)
        elif isinstance(event, WorkerExit) and event.by == "itself" and event.code is not None and event.code < 0:
            self._saw(ExitCode.LOST)

    def _saw(self, code: ExitCode) -> None:
        self._worst = max(self._worst, code, key=_THE_WORST_LAST.index)

    # -- the collector ------------------------------------------------------------------------------------------

    def _hear_collector(self, message: messages.CollectorMessage, now: float) -> None:
        if isinstance(message, messages.RunWelcome):
            tell_answered(self._folder)
            self._tell(pipe.NodeWelcomed(message.run_id))
            self.outbox.change_first(replace(self._hello, run=message.run_id))
        elif isinstance(message, messages.WantedBatch):
            self.outbox.need(message.attempt, message.batch)
            self.ranks.want(message, now)
        elif isinstance(message, messages.LookAtRanks):
            self.ranks.inspect(message.number, now)
        elif isinstance(message, messages.WatchSlowRank):
            self.ranks.watch_slow(message)
        elif isinstance(message, messages.StopRanks):
            self._tell(message)
        elif isinstance(message, pipe.JobResult):
            self._final = message
            if self._done is not None:
                self._tell(message)
            self._link.leave()  # only now: the collector may end then, and an agent after this one could ask nobody

    def _beat(self) -> NodeBeat:
        running = self.ranks.running
        states = [state for watch in running if (state := watch.state())]
        beat = NodeBeat(states, dict(self.outbox.pages_dropped), looks=pack_list(self.ranks.shown_looks()))
        if not self._link.is_looked_at:
            return beat
        hot = closest_modules((hot for watch in running for hot in watch.hottest()), MOST_HOT)
        now = self._telemetry
        gpus, figures = pack_list(now.gpus_now), pack_list([now.host_now])
        return replace(beat, hot=pack_list(hot), gpus=gpus, figures=figures)

    # -- the end ------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        if self._final is not None:
            return
        more = self.outbox.unacknowledged() if self._spool.left_out else []
        spool = keep_spools(self._spools(), Path(self._config.spool_dir), messages.node_of(self._id), more)
        kept = ""
        if spool:
            kept = f"; this node's records are in {spool}, read them with: {command_for(spool)}"
            kept += "; the report of the job's run has them, too, if it is made again beside that file"
        assert self._done is not None
        worst = self._worst if self._worst is not ExitCode.CLEAN else ExitCode.UNKNOWN
        code = int(ExitCode.SIGNAL) + self._done.signal if self._done.outcome == "signal" else int(worst)
        where = self._config.collector
        why = f"the collector at {where} did not answer" if where else "no collector could be started"
        text = f"gpuwatch: no verdict: {why}{kept}"
        saw = spool if self._worst is ExitCode.OVERFLOW else None
        self._tell(pipe.JobResult(code, VerdictKind.UNKNOWN, text, "", overflow_in=str(saw or "")))


def main() -> NoReturn:
    """Entry. Ends the process: the interpreter would wait for ZeroMQ's thread (collector_link.py)."""
    code = 1
    try:
        code = _run()
    except BaseException:
        traceback.print_exc()
    flush_streams()
    os._exit(code)


def _run() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the launch decides when it is over: it closes the pipe
    config = pipe.read_config(0, pipe.AgentConfig)
    if config is None:
        return int(ExitCode.USAGE)
    # memory of a message goes back to the system when it is freed: glibc would keep it in pieces between others
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    try:
        NodeAgentLoop(config, sys.stdout.buffer).run()
    except ForgottenMessages:
        text = f"the collector has lost what it had received; this node sends it again [{Code.COLLECTOR_ENDED}]"
        pipe.write_line(sys.stdout.buffer, pipe.UserNotice(text))
        return 1
    return 0
