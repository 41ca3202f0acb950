"""The collector's socket and its loop: a ROUTER with CURVE, one thread, everything bounded.

Who does not have the job's keys does not get past the handshake; who gets past it and sends anything but well-formed
messages is counted and not answered.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import zmq
from msgspec import structs
from msgspec.json import encode as to_json
from zmq.auth.thread import ThreadAuthenticator

from ..core.errors import ExitCode
from ..core.host import OwnClock
from ..core.tell import tell as log
from ..core.threads import OneThread
from ..core.verdicts import VerdictKind
from ..core.wire.keys import KeyPair, agent_name
from ..core.wire.messages import (
    MAX_MESSAGE_BYTES,
    VERDICT_PATIENCE_S,
    AgentBody,
    AgentLeaving,
    AgentMessage,
    CollectorMessage,
    JobResult,
    MessageAck,
    NameDefinitions,
    PageMessage,
    WireError,
    decode_agent,
    encode,
    node_of,
)
from ..core.wire.pipe import PreflightOver, StageLine, UserNotice
from ..core.wire.view import JobView
from .assemble.stage_lines import StageLines
from .assemble.timeline import utc
from .doorkeeper import CurveAccess
from .facts.fold import FactFold
from .finish import build, stamp, stored_fact, write_page, write_where_there_is_room
from .live.own_numbers import OwnNumbers
from .live.publisher import ViewPublisher, publisher
from .live.snapshot import view_of
from .live.so_far import LiveFindings
from .protocol import Action, FinishRun, LookAhead, NotifyUser, RunProtocol, SendMessage, StoreMessage
from .report.model import RunReport
from .report.text_report import render_text
from .report_file import exit_code
from .run_list import RunPaths
from .store import RunStore
from .waiting_pages import WaitingPages

if TYPE_CHECKING:
    from .live.metrics_endpoint import MetricsExporter  # without --metrics-port, none of it is imported

TICK_MS = 100
_WRITING_TICK_MS = 5
"""While the store is written: what has been written is acknowledged soon."""
_LINGER_MS = 3000
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_BACKLOG = 4096
"""After a stop of this process all agents connect anew at once."""
_BATCH = 2048
_BATCH_BYTES = 16 << 20
"""So many messages, or so many bytes of them, are taken in one turn."""


class ReportFailed(Exception):
    """The report could not be made; every agent has been told so."""


class CollectorServer:
    """Listens from the moment it is made. Raises zmq.ZMQError when the address cannot be bound."""

    def __init__(
        self,
        bind: str,
        public_key: str,
        private_key: str,
        agent_public_key: str,
        viewer_public_key: str = "",
        viewer_private_key: str = "",
    ) -> None:
        """With the viewer's private key, the job can be looked at: it is written into the run's folder."""
        self.metrics: MetricsExporter | None = None
        """What is scraped; it is closed with the server."""
        self._looked_at = False
        self._context = zmq.Context()
        self._view: ViewPublisher | None = None
        self._doorkeeper = CurveAccess(agent_public_key, viewer_public_key)
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self._doorkeeper)
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._socket.linger = _LINGER_MS
            self._socket.ipv6 = True
            self._socket.maxmsgsize = MAX_MESSAGE_BYTES
            self._socket.rcvhwm = 1000
            self._socket.backlog = _BACKLOG
            self._socket.router_handover = True
            # no heartbeats of its own: libzmq 4.3.5 aborts in their timer where input has stopped and its connection
            # breaks (stream_engine_base.cpp, `!_io_error`). The agents beat, and say how long a beat counts
            self._socket.tcp_keepalive = 1
            self._socket.tcp_keepalive_idle = 30
            self._socket.curve_server = True
            self._socket.curve_publickey = public_key.encode()
            self._socket.curve_secretkey = private_key.encode()
            self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_FAILURES)
            self._socket.bind(bind)
            if viewer_private_key:
                self._view = publisher(
                    self._context,
                    self._socket.getsockopt_string(zmq.LAST_ENDPOINT),
                    KeyPair(public_key.encode(), private_key.encode()),
                    KeyPair(viewer_public_key.encode(), viewer_private_key.encode()),
                )
        except BaseException:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.malformed = 0
        self._lines = StageLines()
        self._maker = OneThread()
        self._credit = -1
        self._routes: dict[str, bytes] = {}
        """The identity of each agent that was taken in, by its name: how it is answered."""
        self._speaking = ("", b"")
        """The name and the identity of who was heard last, taken in or not."""
        self._pages = WaitingPages()
        self._ahead: dict[tuple[str, int], tuple[AgentMessage, bytes]] = {}
        """Events that were looked at and have yet to come in their order."""
        self._handed_over: dict[str, int] = {}
        """agent -> the number up to which the store has it all, or is writing it"""

    def serve_metrics(self, address: str) -> None:
        """At `HOST:PORT`, from now on; "" is nowhere. Raises UsageError where it cannot."""
        if address:
            from .live.metrics_endpoint import MetricsExporter

            self.metrics = MetricsExporter(address)
            self._looked_at = True

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
        """Until the job is over; returns the report, which has been written and sent to every agent.

        `folded` holds what a collector before this one has received.

        `on_end` is called once, with the time, when `end_fd` has something to read or is closed. `tell` is given the
        lines of the preflight while it runs, and sentences for the user.
        """
        self._tell = tell or (lambda line: None)
        self._folded = folded if folded is not None else FactFold(store.page, store.history)
        self._live = LiveFindings(self._folded, self._say, log)
        if self._view is not None:
            self._view.tell(paths.folder)
        clock = OwnClock()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if end_fd is not None:
            poller.register(end_fd, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(0 if self._pages else _WRITING_TICK_MS if store.is_writing else TICK_MS))
            now = clock.now()
            if end_fd is not None and end_fd in ready:
                poller.unregister(end_fd)
                end_fd = None
                on_end(now)
            if self._socket in ready:
                self._receive(store, run_protocol, now)
            self._live.tick()
            self._pages.take(self._fold)
            self._show(paths.run_id, store, run_protocol, now)
            self._write(store, run_protocol)
            self._count_failed_handshakes()
            for line in self._lines.due():
                self._tell(line)
            if self._act(run_protocol.tick(now)):
                return self._finish(paths, store, run_protocol)

    def _receive(self, store: RunStore, run_protocol: RunProtocol, now: float) -> None:
        taken: dict[str, None] = {}
        for agent, message, data in self._messages():
            if isinstance(message.body, PageMessage | NameDefinitions):
                taken[agent] = None
            for action in run_protocol.hear(agent, message, now):
                if isinstance(action, LookAhead):
                    self._ahead[agent, message.n] = message, data
                    self._fold(agent, 0, message.body)
                elif isinstance(action, StoreMessage):
                    self._ahead.pop((agent, message.n), None)
                    self._lines.hear(message.body)
                    if message.n:
                        store.add(agent, message, data)
                    else:
                        store.beat(agent, data)
                    if isinstance(message.body, PageMessage):
                        self._pages.put(agent, message.n, message.body, len(data))
                    else:
                        self._fold(agent, message.n, message.body)
                else:
                    self._act([action])
            if agent in run_protocol.nodes:
                self._routes[agent] = self._speaking[1]
        self._credit = self._credit_now(store, run_protocol)
        self._act(run_protocol.taken(taken))

    def _credit_now(self, store: RunStore, run_protocol: RunProtocol) -> int:
        return run_protocol.credit if store.has_room and self._pages.has_room else 0

    def _fold(self, agent: str, n: int, body: AgentBody) -> None:
        self._folded.add(agent, n, body)
        self._live.hear(body)

    def _write(self, store: RunStore, run_protocol: RunProtocol) -> None:
        """Acknowledge what has been written, and hand over what is new: an acknowledgement means, it is on the disk."""
        written = store.written()
        self._credit = self._credit_now(store, run_protocol)
        if written:
            self._act(run_protocol.committed(self._handed_over))
        if store.is_writing:
            return
        received = run_protocol.received
        if not store.has_new:
            self._act(run_protocol.committed(received))
        elif store.begin():
            self._handed_over = received

    def _messages(self) -> Iterator[tuple[str, AgentMessage, bytes]]:
        """What has come, without what is malformed; a bounded number, so that the rest gets its turn."""
        taken = 0
        for _ in range(_BATCH):
            if taken > _BATCH_BYTES:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            taken += sum(map(len, parts))
            if not self._doorkeeper.may_speak(parts[-1]):
                continue
            if len(parts) != 2:
                self.malformed += 1
                continue
            identity, data = parts[0].bytes, parts[1].bytes
            try:
                self._speaking = agent_name(identity), identity
                yield self._speaking[0], decode_agent(data), data
            except (WireError, UnicodeDecodeError):
                self.malformed += 1

    def _act(self, actions: Sequence[Action]) -> bool:
        """Do what the run_protocol says; True when it says that the run is over."""
        for action in actions:
            if isinstance(action, SendMessage):
                self._send(action.agent, action.message)
            elif isinstance(action, NotifyUser):
                self._tell(UserNotice(action.text))
        return any(isinstance(action, FinishRun) for action in actions)

    def _show(self, run: str, store: RunStore, run_protocol: RunProtocol, now: float) -> None:
        """To viewers, and to who scrapes. The agents are told when the first has come or the last has left."""
        if self._view is not None:
            self._view.show(lambda: self._picture(run), now)
        if self.metrics is not None:
            self.metrics.show(lambda: (self._picture(run), self._own_numbers(store, run_protocol)), now)
        looked_at = self.metrics is not None or (self._view is not None and self._view.has_viewers)
        if looked_at != self._looked_at:
            self._looked_at = looked_at
            self._act(run_protocol.tell_again())

    def _picture(self, run: str) -> JobView:
        verdict = self._live.verdict_so_far
        kind = VerdictKind.OVERFLOW if verdict else ""
        return view_of(self._folded.as_it_stands(), run, time.time_ns(), verdict, kind, self._live.slow)

    def _own_numbers(self, store: RunStore, run_protocol: RunProtocol) -> OwnNumbers:
        faults = self.metrics.faults if self.metrics is not None else 0
        return OwnNumbers(*store.waiting, store.dropped, self._turned_away(run_protocol), faults)

    def _turned_away(self, run_protocol: RunProtocol) -> dict[str, int]:
        return {
            "refused": self._doorkeeper.refused + run_protocol.strangers,
            "failed_handshakes": self._doorkeeper.failed_handshakes,
            "from_viewers": self._doorkeeper.from_viewers,
            "replayed": run_protocol.replays,
            "malformed": self.malformed,
            "disbelieved": run_protocol.disbelieved,
        }

    def _say(self, sentence: str) -> None:
        log(f"{utc(time.time(), 'milliseconds')} {sentence}")
        self._tell(UserNotice(sentence))

    def _send(self, agent: str, message: CollectorMessage) -> None:
        if isinstance(message, MessageAck):
            message = structs.replace(message, time_ns=time.time_ns(), credit=self._credit, looks=self._looked_at)
        try:
            identity = self._speaking[1] if agent == self._speaking[0] else self._routes[agent]
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except KeyError:
            pass  # a collector before this one has heard it: it has not spoken since
        except zmq.ZMQError:
            pass  # it is gone, or does not read: it asks again when it is back

    def _count_failed_handshakes(self) -> None:
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self._doorkeeper.handshake_failed()

    def _finish(self, paths: RunPaths, store: RunStore, run_protocol: RunProtocol) -> RunReport:
        """Make the report in a thread of its own, answer beats meanwhile, and see that every agent has the verdict."""
        while self._pages:
            self._pages.take(self._fold)
        for (agent, _), (message, data) in self._ahead.items():  # it was never sent again: the report knows of it
            store.add(agent, message, data)
        stamp(store, "ended")
        store.set("lost_agents", to_json(run_protocol.lost_agents).decode())
        counters = self._turned_away(run_protocol)
        if self.metrics is not None:
            counters["metrics_faults"] = self.metrics.faults
        store.set("counters", to_json(counters).decode())
        if store.commit():
            self._act(run_protocol.committed(run_protocol.received))
        made = self._maker.submit(lambda: _make(paths, store, self._folded))
        while not made.done():
            if self._socket.poll(TICK_MS):
                for agent, message, _ in self._messages():
                    if message.n == 0:
                        self._send(agent, run_protocol.answer_while_finishing(agent, message))
        self._maker.close()
        for line in self._lines.end():
            self._tell(line)
        error = made.exception()
        final = made.result()[1] if error is None else _no_report(paths, error)
        if self.metrics is not None:
            self.metrics.conclude(final.kind)
        self._bid_farewell(store, run_protocol, final)
        if error is not None:
            raise ReportFailed(str(error)) from error
        return made.result()[0]

    def _bid_farewell(self, store: RunStore, run_protocol: RunProtocol, final: JobResult) -> None:
        """Until every node has said that it has the verdict. One that was not connected gets it when it is heard, from
        an agent that has ended and was started again, too.

        Who has left is in the store: a collector that is started again now does not wait for them.
        """
        nodes = {node_of(agent) for agent in run_protocol.nodes}
        speaking = [agent for agent, node in run_protocol.nodes.items() if not node.replaced]
        for agent in speaking:
            self._send(agent, final)
        left = set(stored_fact(store, "left", list[str], []))
        present = {node_of(agent) for agent in speaking if not run_protocol.nodes[agent].lost} - left
        clock, ends = OwnClock(), VERDICT_PATIENCE_S
        while present and clock.now() < ends:
            if not self._socket.poll(TICK_MS):
                continue
            before = len(left)
            for agent, message, _ in self._messages():
                if isinstance(message.body, AgentLeaving):
                    left.add(node_of(agent))
                elif node_of(agent) in nodes:
                    self._send(agent, final)
            present -= left
            if len(left) > before:
                store.set("left", to_json(sorted(left)).decode())
                store.commit()

    def close(self) -> None:
        """Let the last messages out, then close everything."""
        if self.metrics is not None:
            self.metrics.close()
        if self._view is not None:
            self._view.close()
        if hasattr(self, "_monitor"):
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close()
        self._authenticator.stop()
        self._context.term()


def _make(paths: RunPaths, store: RunStore, folded: FactFold) -> tuple[RunReport, JobResult]:
    """In a thread: build the report and write it.

    What is kept of many pages is a million objects, and stays: the garbage collector is to leave it alone.
    """
    gc.freeze()
    try:
        report = build(store, paths.run_id, folded)
        paths, trouble = write_where_there_is_room(paths, store, report)
        text = render_text(report)
        text += f"\n\n{trouble}" if trouble else f"\n\nreport: {paths.report_json}\n{_page(paths, report)}"
        return report, JobResult(exit_code(report), report.verdict.kind, text, str(paths.report_json))
    finally:
        gc.unfreeze()


def _page(paths: RunPaths, report: RunReport) -> str:
    return write_page(paths, report) or f"as a page: {paths.report_html}"


def _no_report(paths: RunPaths, error: BaseException) -> JobResult:
    text = (
        f"gpuwatch: the report could not be made ({type(error).__name__}: {error}); what was received is in "
        f"{paths.store}; to try again: gpuwatch report --again {paths.run_id}"
    )
    return JobResult(int(ExitCode.UNKNOWN), VerdictKind.UNKNOWN, text, str(paths.report_json))
