"""The collector's loop: hears the agents, stores, folds, shows, and makes the report. One thread, everything bounded.

socket --> events, names, beats --> fold, verdict
       --> pages, some a turn   --> fold, verdict
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import zmq
from msgspec import structs
from msgspec.json import encode as to_json

from ..core.codes import coded
from ..core.guest.tell import tell as log
from ..core.guest.threads import OneThread
from ..core.host import OwnClock, raise_file_limit
from ..core.wire import messages as wire
from ..core.wire.beat import NodeBeat
from ..core.wire.keys import KeyPair
from ..core.wire.messages import VERDICT_PATIENCE_S, AgentBody, AgentMessage, MessageAck, PageMessage, node_of
from ..core.wire.pipe import PreflightOver, StageLine, UserNotice
from .agent_socket import AgentSocket, CurveAccess
from .assemble.timeline import utc
from .decide.overflow_at_rest import RestingOverflow
from .facts.fold import FactFold
from .finish import make_report, no_report, stamp, started_ns, stored_fact
from .protocol import RunProtocol
from .report.model import RunReport
from .run_actions import Action, FinishRun, LookAhead, NotifyUser, SendMessage, StoreMessage
from .run_files import RunPaths
from .so_far import LiveFindings
from .stage_lines import StageLines
from .store import RunStore
from .views.job_viewers import JobViewers
from .waiting_lines import ClockLines, WaitingLines

if TYPE_CHECKING:
    from .views.metrics_endpoint import OwnNumbers  # without --metrics-port, none of it is imported

TICK_MS = 100
_WRITING_TICK_MS = 5
"""A shorter tick while the store is written, so that messages are acknowledged soon after they are durable."""
_AT_ONCE_BYTES = 2 << 20
"""Bytes of pages that are folded in one turn."""
_ROOM_BYTES = 16 << 20
"""While this many bytes of pages wait, no more are requested."""
_NODES_EVERY_S = 1.0
"""All nodes are looked at this often: whether one is missing, or its clock is off."""


class ReportFailed(Exception):
    """The report could not be made; every agent was sent that result."""


class WaitingPages:
    """Received pages that wait to be folded. Later events and beats are folded first.

    Messages are received, stored and acknowledged in order. Only the folding of pages waits, because facts may be
    put together in any order.
    """

    def __init__(self) -> None:
        self._pages: deque[tuple[str, int, PageMessage, int]] = deque()
        self._num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._pages)

    @property
    def has_room(self) -> bool:
        """Whether to request more pages."""
        return self._num_bytes < _ROOM_BYTES

    def put(self, agent: str, n: int, page: PageMessage, num_bytes: int) -> None:
        """Queue a received page of `num_bytes`."""
        self._pages.append((agent, n, page, num_bytes))
        self._num_bytes += num_bytes

    def drain(self, look: Callable[[str, int, PageMessage], None]) -> None:
        """Call `look` for some pages, the oldest first."""
        left = _AT_ONCE_BYTES
        while self._pages and left > 0:
            agent, n, page, num_bytes = self._pages.popleft()
            self._num_bytes -= num_bytes
            left -= num_bytes
            look(agent, n, page)


class CollectorServer:
    """Listens from the moment it is made. Raises zmq.ZMQError when the address cannot be bound."""

    _paths: RunPaths
    _store: RunStore
    _protocol: RunProtocol
    _folded: FactFold
    _live: LiveFindings
    _tell: Callable[[StageLine | PreflightOver | UserNotice], object]
    """Arguments of `run`, and objects that it makes for its one run."""

    def __init__(
        self,
        bind: str,
        public_key: str,
        private_key: str,
        agent_public_key: str,
        viewer_public_key: str = "",
        viewer_private_key: str = "",
    ) -> None:
        """The viewer's private key is written into the run's folder; without it, nobody can view the job."""
        self._context = zmq.Context()
        self._access = CurveAccess(agent_public_key, viewer_public_key)
        keys = KeyPair(public_key.encode(), private_key.encode())
        try:
            self._socket = AgentSocket(self._context, bind, keys, self._access)
        except BaseException:
            self._context.term()
            raise
        self.address = self._socket.address
        viewer = KeyPair(viewer_public_key.encode(), viewer_private_key.encode()) if viewer_private_key else None
        self.viewers = JobViewers(self._context, self.address, keys, viewer, self._say)
        """Who looks on; closed with the server."""
        self._credit = -1
        self._pages = WaitingPages()
        self._ahead: dict[tuple[str, int], tuple[AgentMessage, bytes]] = {}
        """Events that were inspected ahead of order and have yet to arrive in order."""
        self._handed_over: dict[str, int] = {}
        """agent -> the number up to which the store has it all, or is writing it"""

    def run(
        self,
        paths: RunPaths,
        store: RunStore,
        run_protocol: RunProtocol,
        on_end: Callable[[float], None],
        end_fd: int | None,
        tell: Callable[[StageLine | PreflightOver | UserNotice], object] | None = None,
        folded: FactFold | None = None,
    ) -> RunReport:
        """Run until the job is over. Returns the report, which has been written and sent to every agent.

        `folded` holds the messages that an earlier collector of this run has received.

        `on_end` is called once, with the time, when `end_fd` has something to read or is closed. `tell` receives the
        lines of the preflight while it runs, and sentences for the user.
        """
        self._paths, self._store, self._protocol = paths, store, run_protocol
        self._tell = tell or (lambda line: None)
        self._folded = folded if folded is not None else FactFold(store.page, store.history)
        self._lines = StageLines(self._folded)
        self._clocks = ClockLines(self._folded)
        self._waiting = WaitingLines(self._folded, raise_file_limit())
        self._nodes_due = 0.0
        self._live = LiveFindings(self._folded, self._say, log, self._forecast)
        self._watched = self._live.stragglers.watched
        run_protocol.overflow_at_rest = self._overflow_at_rest
        self.viewers.begin(
            paths.run_id, paths.folder, self._folded, self._live, started_ns(store), lambda: run_protocol.asking.last
        )
        clock, poller = OwnClock(), zmq.Poller()
        poller.register(self._socket.socket, zmq.POLLIN)
        if end_fd is not None:
            poller.register(end_fd, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(0 if self._pages else _WRITING_TICK_MS if store.is_writing else TICK_MS))
            now = clock.now()
            if end_fd is not None and end_fd in ready:
                poller.unregister(end_fd)
                end_fd = None
                on_end(now)
            if self._socket.socket in ready:
                self._receive(now)
            self._live.tick()
            self._watch_slow_rank()
            self._pages.drain(self._fold)
            self.viewers.show(now, self._own_numbers, self._look_for_viewers, self._tell_again)
            self._write()
            for agent in self._socket.closed_connections():
                run_protocol.on_closed(agent, now)
            for line in self._lines.due():
                self._tell(line)
            self._tell_of_nodes(now)
            if self._act(run_protocol.tick(now)):
                return self._finish()

    def _watch_slow_rank(self) -> None:
        asked = self._live.stragglers.watched
        if asked != self._watched:
            self._watched = asked
            self._act(self._protocol.watch_slow_rank(asked))

    def _tell_of_nodes(self, now: float) -> None:
        if now < self._nodes_due:
            return
        self._nodes_due = now + _NODES_EVERY_S
        sentences = self._waiting.due(now, self._turned_away()["refused"])
        for sentence in (*sentences, *self._clocks.due(datetime.now(timezone.utc))):
            self._say(sentence)

    def _receive(self, now: float) -> None:
        taken: dict[str, None] = {}
        for agent, message, data in self._socket.messages():
            if isinstance(message.body, PageMessage | wire.NameDefinitions):
                taken[agent] = None
            for action in self._protocol.on_message(agent, message, now):
                if isinstance(action, LookAhead):
                    self._ahead[agent, message.n] = message, data
                    self._fold(agent, 0, message.body)
                elif isinstance(action, StoreMessage):
                    self._keep(agent, message, data)
                else:
                    self._act([action])
            if agent in self._protocol.nodes:
                self._socket.take_in(agent)
        self._credit = self._credit_now()
        self._act(self._protocol.taken(taken))

    def _keep(self, agent: str, message: AgentMessage, data: bytes) -> None:
        self._ahead.pop((agent, message.n), None)
        self._lines.on_message(message.body)
        if message.n:
            self._store.add(agent, message, data)
        else:
            self._store.beat(agent, data)
        if isinstance(message.body, PageMessage):
            self._pages.put(agent, message.n, message.body, len(data))
        else:
            self._fold(agent, message.n, message.body)

    def _overflow_at_rest(self) -> RestingOverflow | None:
        while self._pages:
            self._pages.drain(self._fold)
        return self._live.overflow_at_rest()

    def _credit_now(self) -> int:
        return self._protocol.credit if self._store.has_room and self._pages.has_room else 0

    def _fold(self, agent: str, n: int, body: AgentBody) -> None:
        self._folded.add(agent, n, body)
        self._live.on_message(body)
        if isinstance(body, NodeBeat) and body.looks:
            self.viewers.on_message(body)

    def _write(self) -> None:
        """Acknowledge written messages and hand over new ones. An acknowledgement means that they are on the disk."""
        written = self._store.written()
        self._credit = self._credit_now()
        if written:
            self._act(self._protocol.committed(self._handed_over))
        if self._store.is_writing:
            return
        received = self._protocol.received
        if not self._store.has_new:
            self._act(self._protocol.committed(received))
        elif self._store.begin():
            self._handed_over = received

    def _act(self, actions: Sequence[Action]) -> bool:
        """Carry out the protocol's actions; True if the run is over."""
        for action in actions:
            if isinstance(action, SendMessage):
                self._send(action.agent, action.message)
            elif isinstance(action, NotifyUser):
                self._tell(UserNotice(coded(action.text, action.code)))
                self.viewers.notify("stall", action.text)
        return any(isinstance(action, FinishRun) for action in actions)

    def _look_for_viewers(self) -> None:
        self._act(self._protocol.look_for_viewers())

    def _tell_again(self) -> None:
        self._act(self._protocol.tell_again())

    def _own_numbers(self) -> OwnNumbers:
        from .views.metrics_endpoint import OwnNumbers

        metrics = self.viewers.metrics
        faults = metrics.faults if metrics is not None else 0
        return OwnNumbers(*self._store.waiting, self._store.dropped, self._turned_away(), faults)

    def _turned_away(self) -> dict[str, int]:
        found, told = self._access.turned_away, self._protocol
        refused = found["refused"] + told.strangers
        return {**found, "refused": refused, "replayed": told.replays, "disbelieved": told.disbelieved}

    def _say(self, sentence: str) -> None:
        log(f"{utc(time.time(), 'milliseconds')} {sentence}")
        self._tell(UserNotice(sentence))

    def _forecast(self, sentence: str) -> None:
        self._say(sentence)
        self.viewers.notify("forecast", sentence)

    def _send(self, agent: str, message: wire.CollectorMessage) -> None:
        if isinstance(message, MessageAck):
            message = structs.replace(
                message, time_ns=time.time_ns(), credit=self._credit, looks=self.viewers.is_looked_at
            )
        self._socket.send(agent, message)

    def _finish(self) -> RunReport:
        """Make the report in its own thread, answer beats meanwhile, and deliver the verdict to every agent."""
        store, run_protocol = self._store, self._protocol
        while self._pages:
            self._pages.drain(self._fold)
        for (agent, _), (message, data) in self._ahead.items():  # it was never sent again: the report knows of it
            store.add(agent, message, data)
        stamp(store, "ended")
        store.set("lost_agents", to_json(run_protocol.lost_agents).decode())
        store.set("killed_agents", to_json(run_protocol.killed_agents).decode())
        counters = self._turned_away()
        metrics = self.viewers.metrics
        if metrics is not None:
            counters["metrics_faults"] = metrics.faults
        store.set("counters", to_json(counters).decode())
        if store.commit():
            self._act(run_protocol.committed(run_protocol.received))
        maker = OneThread()
        made = maker.submit(lambda: make_report(self._paths, store, self._folded))
        while not made.done():
            if self._socket.socket.poll(TICK_MS):
                for agent, message, _ in self._socket.messages():
                    if message.n == 0:
                        self._send(agent, run_protocol.answer_while_finishing(agent, message))
        maker.close()
        for line in self._lines.end():
            self._tell(line)
        error = made.exception()
        final = made.result()[1] if error is None else no_report(self._paths, error)
        if metrics is not None:
            metrics.conclude(final.kind)
        if error is None:
            self.viewers.notify_verdict(made.result()[0].verdict, final.exit_code)
        else:
            self.viewers.notify("verdict", f"the report could not be made ({type(error).__name__}: {error})")
        self._bid_farewell(final)
        if error is not None:
            raise ReportFailed(str(error)) from error
        return made.result()[0]

    def _bid_farewell(self, final: wire.JobResult) -> None:
        """Send the verdict until every node has confirmed it. A node that was not connected gets it when it is heard,
        also if its agent has been restarted.

        The store records who has left, so that a collector that is restarted now does not wait for them.
        """
        agents = self._protocol.nodes
        nodes = {node_of(agent) for agent in agents}
        speaking = [agent for agent, node in agents.items() if not node.replaced]
        for agent in speaking:
            self._send(agent, final)
        left = set(stored_fact(self._store, "left", list[str], []))
        present = {node_of(agent) for agent in speaking if not agents[agent].lost} - left
        clock, ends = OwnClock(), VERDICT_PATIENCE_S
        while present and clock.now() < ends:
            if not self._socket.socket.poll(TICK_MS):
                continue
            before = len(left)
            for agent, message, _ in self._socket.messages():
                if isinstance(message.body, wire.AgentLeaving):
                    left.add(node_of(agent))
                elif node_of(agent) in nodes:
                    self._send(agent, final)
            present -= left
            if len(left) > before:
                self._store.set("left", to_json(sorted(left)).decode())
                self._store.commit()

    def close(self) -> None:
        """Let the last messages out, then close everything."""
        self.viewers.close()
        self._socket.close()
        self._context.term()
