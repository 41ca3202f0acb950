"""A real server on the loopback, and real sockets that talk to it."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import threading
import time

import gpuwatch.collector.finish as finish_module
import gpuwatch.collector.server as server_module
import msgspec
import pytest
import zmq
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.protocol import RunProtocol
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.collector.run_files import exit_code, new_run
from gpuwatch.collector.server import CollectorServer
from gpuwatch.collector.store import RunStore
from gpuwatch.core.codes import VerdictKind
from gpuwatch.core.wire.beat import NodeBeat
from gpuwatch.core.wire.keys import agent_name
from gpuwatch.core.wire.messages import (
    AgentLeaving,
    AgentMessage,
    AgentRefused,
    JobResult,
    MessageAck,
    NodeBye,
    RunWelcome,
    decode_collector,
    encode,
)

from ..known_keys import KEYS, STRANGER
from ..waiting import until

pytestmark = pytest.mark.quick_here(8)

WAIT_MS = 300_000


class Running:
    """A server in a thread; `end` is what Ctrl-C is to a collector that was started by hand."""

    def __init__(self, folder) -> None:
        self.paths = new_run(folder)
        self.server = CollectorServer(
            "tcp://127.0.0.1:*",
            KEYS.collector.public.decode(),
            KEYS.collector.private.decode(),
            KEYS.agent.public.decode(),
            KEYS.viewer.public.decode(),
        )
        self.address = self.server.address
        self.protocol = RunProtocol(self.paths.run_id, "job")
        self.report = self.error = None
        self._end, self._closing = os.pipe()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        store = RunStore(self.paths.store, create=True)
        try:
            self.report = self.server.run(self.paths, store, self.protocol, self.protocol.end_now, end_fd=self._end)
        except Exception as error:  # the test finds that nobody answers
            self.error = error
        finally:
            self.server.close()
            store.close()

    def end(self) -> None:
        """For a test that has left its agents alive."""
        os.close(self._closing)
        self.join()
        os.close(self._end)

    def join(self):
        self._thread.join(300)
        assert not self._thread.is_alive()
        return self.report


@pytest.fixture
def running(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "gpuwatch.collector.server.VERDICT_PATIENCE_S", 0.5
    )  # for agents of a test that say nothing more
    made = Running(tmp_path)
    yield made
    made.end()


@pytest.fixture
def connect(running):
    context, sockets = zmq.Context(), []

    def make_socket(pair=KEYS.agent, identity=b"a0", server_key=KEYS.collector.public):
        made = context.socket(zmq.DEALER)
        sockets.append(made)
        made.identity = identity
        made.curve_serverkey = server_key
        made.curve_publickey, made.curve_secretkey = pair.public, pair.private
        made.connect(running.address)
        return made

    yield make_socket
    for made in sockets:
        if made.closed:
            continue
        made.disable_monitor()
        made.close(linger=0)
    context.destroy(linger=0)


def receive(socket):
    assert socket.poll(WAIT_MS), "the server did not answer"
    return decode_collector(socket.recv())


def acknowledged(socket) -> int:
    answer = receive(socket)
    assert isinstance(answer, MessageAck)
    return answer.n


def say_goodbye(agent) -> JobResult:
    """As an agent does when its launch has ended: Bye, and Leaving once it has the verdict."""
    agent.send(encode(AgentMessage(2, NodeBye("ok"), 1)))
    while not isinstance(message := receive(agent), JobResult):
        pass
    agent.send(encode(AgentMessage(0, AgentLeaving())))
    return message


def test_while_the_store_is_being_written_everybody_is_heard_and_nothing_is_acknowledged(
    running, connect, make, monkeypatch
):
    monkeypatch.setattr("gpuwatch.collector.store.ROOM_BYTES", 1)
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=1))))
    receive(agent)
    assert acknowledged(agent) == 1
    with contextlib.closing(sqlite3.connect(running.paths.store, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # as a slow disk does: whoever writes waits
        agent.send(encode(AgentMessage(2, make.raised(0), 1)))
        agent.send(encode(AgentMessage(0, NodeBeat([], {}, sent_ns=1))))
        answer = receive(agent)
        assert isinstance(answer, MessageAck)
        assert (answer.n, answer.received, answer.echo_ns) == (1, 2, 1)
        while answer.credit:  # no pages before the disk has what is there: from the next turn on
            agent.send(encode(AgentMessage(0, NodeBeat([], {}, sent_ns=2))))
            answer = receive(agent)
        other.execute("ROLLBACK")
    answer = receive(agent)
    assert isinstance(answer, MessageAck)
    assert answer.n == 2
    assert answer.credit > 0
    store = RunStore(running.paths.store)
    assert [n for _, n, _ in store.messages() if n] == [1, 2]
    store.close()


def test_an_acknowledged_beat_brings_back_its_time_and_the_collectors(running, connect, make):
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=0))))
    receive(agent), receive(agent)
    before = time.time_ns()
    agent.send(encode(AgentMessage(0, NodeBeat([], {}, sent_ns=before))))
    answer = receive(agent)
    assert (answer.n, answer.echo_ns, answer.received) == (1, before, 1)
    assert answer.credit == running.protocol.credit > 0
    assert before <= answer.time_ns <= time.time_ns()
    say_goodbye(agent)


def test_an_agent_with_the_keys_is_welcomed_acknowledged_and_told_the_verdict(running, connect, make):
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=0))))
    assert receive(agent) == RunWelcome(running.paths.run_id)
    assert acknowledged(agent) == 1
    agent.send(encode(AgentMessage(2, NodeBye("ok"), 1)))
    assert acknowledged(agent) == 2
    final = receive(agent)
    assert isinstance(final, JobResult)
    agent.send(encode(AgentMessage(0, AgentLeaving())))
    assert (final.exit_code, final.kind) == (6, "unknown"), "no rank was ever heard"
    report = running.join()
    assert report.verdict.statement in " ".join(final.text.split())
    assert running.paths.report_json.exists()
    assert report.collector["refused"] == report.collector["malformed"] == 0


def test_an_agent_that_is_started_again_while_the_verdict_is_told_has_it_too(running, connect, make, monkeypatch):
    monkeypatch.setattr("gpuwatch.collector.server.VERDICT_PATIENCE_S", 300.0)
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=0))))
    agent.send(encode(AgentMessage(2, NodeBye("ok"), 1)))
    while not isinstance(receive(agent), JobResult):
        pass
    agent.close(linger=0)  # killed before it could hand the verdict on
    again = connect(identity=b"a0.1")
    again.send(encode(AgentMessage(1, make.hello_of("a0.1", nproc=0))))
    final = receive(again)
    assert isinstance(final, JobResult)
    again.send(encode(AgentMessage(0, AgentLeaving())))
    assert running.join().verdict.statement in " ".join(final.text.split())


def test_the_end_of_an_agents_connection_is_known_and_that_of_a_stranger_is_nobodys(running, connect, make):
    closed = []
    running.protocol.on_closed = lambda agent, now: closed.append(agent)
    with socket.create_connection(("127.0.0.1", int(running.address.rpartition(":")[2]))):
        pass
    agents = [connect(identity=name) for name in (b"a0", b"a1")]
    for number, agent in enumerate(agents):
        agent.send(encode(AgentMessage(1, make.hello_of(f"a{number}", nproc=0, nodes=2))))
        assert isinstance(receive(agent), RunWelcome)
    agents[1].close(linger=0)
    until(lambda: closed, "the end of a1's connection", lambda: running.error)

    assert closed == [agent_name(b"a1")]
    assert acknowledged(agents[0]) == 1


def test_an_acknowledged_message_is_in_the_store(running, connect, make):
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of())))
    receive(agent)
    receive(agent)
    store = RunStore(running.paths.store)
    assert [n for _, n, _ in store.messages()] == [1]
    store.close()


def test_a_client_with_other_keys_is_refused_and_counted(running, connect, make):
    stranger = connect(STRANGER.agent, b"stranger")
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    stranger.send(encode(AgentMessage(1, make.hello_of("stranger"))))
    assert monitor.poll(WAIT_MS)
    assert not stranger.poll(0)
    monitor.close()
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=0))))
    say_goodbye(agent)
    report = running.join()
    assert report.collector["refused"] >= 1
    assert agent_name(b"stranger") not in running.protocol.nodes


def test_strangers_leave_a_line_in_the_collectors_log_and_not_one_for_each_knock(running, connect, make, capsys):
    monitors = []
    for number in range(5):
        stranger = connect(STRANGER.agent, b"stranger %d" % number)
        stranger.reconnect_ivl = -1
        monitors.append(stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH))
        assert monitors[-1].poll(WAIT_MS)
    with socket.create_connection(("127.0.0.1", int(running.address.rpartition(":")[2]))) as no_zeromq:
        no_zeromq.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while no_zeromq.recv(100):  # until it is thrown out
                pass
    for monitor in monitors:
        monitor.close()
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=0))))
    say_goodbye(agent)
    report = running.join()
    assert report.collector["refused"] >= 5
    lines = [line for line in capsys.readouterr().err.splitlines() if "refused a stranger with another key" in line]
    assert lines[0].endswith("1 so far")
    assert 0 < len(lines) < report.collector["refused"]
    assert "clients with another key" in render_text(report)


def test_what_a_viewer_sends_is_not_read_and_counted(running, connect, make):
    viewer = connect(KEYS.viewer, b"a0")
    for body in (make.hello_of(nproc=0), NodeBye("failed")):
        viewer.send(encode(AgentMessage(1, body)))
    viewer.send(b"\xff garbage")
    until(lambda: running.server._access.turned_away["from_viewers"] >= 3, "three messages of a viewer, counted")
    assert not viewer.poll(0)
    assert running.protocol.nodes == {}
    viewer.close(linger=0)
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=0))))
    say_goodbye(agent)
    report = running.join()
    assert (report.collector["from_viewers"], report.collector["malformed"]) == (3, 0)
    assert report.nodes[0].state == "ok"
    assert "the collector rejected: 3 messages of viewers" in render_text(report)


def test_garbage_after_a_good_handshake_is_counted_and_the_server_goes_on(running, connect, make):
    agent = connect()
    agent.send(b"\xff\xfe garbage")
    agent.send(b"")
    agent.send_multipart([b"two", b"parts"])
    odd = connect(identity=b"\xff\xfe")
    odd.send(encode(AgentMessage(1, make.hello("odd"))))
    agent.send(encode(AgentMessage(0, make.NodeBeat([], {}))))
    assert receive(agent).resend  # it has not said hello
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=0))))
    assert isinstance(receive(agent), RunWelcome)
    say_goodbye(agent)
    report = running.join()
    assert report.collector["malformed"] >= 3


def test_a_well_formed_message_with_absurd_numbers_does_not_end_the_server(running, connect, make):
    evil = connect(identity=b"evil")
    evil.send(encode(AgentMessage((1 << 64) - 1, make.hello_of("evil", nproc=0, nodes=1))))
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=0))))
    assert agent.poll(1000), running.error


def test_who_knows_an_agents_name_and_the_jobs_keys_can_say_nothing_in_its_place(running, connect, make):
    """Its name is in the store, in the report and in the name of its spool."""
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=1))))
    assert isinstance(receive(agent), RunWelcome)
    (name,) = running.protocol.nodes
    insider = connect(identity=name.encode())
    insider.send(encode(AgentMessage(1, make.hello_of(nproc=1))))
    insider.send(encode(AgentMessage(2, NodeBye("ok"), 1)))
    heard = receive(insider)
    assert isinstance(heard, AgentRefused), heard
    later = connect(identity=f"{name}.7".encode())
    later.send(encode(AgentMessage(1, make.hello(f"{name}.7", nproc=1))))
    assert isinstance(receive(later), AgentRefused)

    agent.send(encode(AgentMessage(2, make.raised(0), 1)))
    while acknowledged_of(receive(agent)) < 2:
        pass
    agent.send(encode(AgentMessage(3, NodeBye("failed"), 2)))
    while not isinstance(receive(agent), JobResult):
        pass
    agent.send(encode(AgentMessage(0, AgentLeaving())))
    report = running.join()
    assert [rank.rank for rank in report.ranks] == [0], "what it said was taken for a duplicate, and lost"
    assert report.nodes[0].state == "failed"
    assert report.collector["refused"] >= 2


def test_a_port_that_is_taken_is_an_error_at_once_and_leaves_nothing_open(running):
    with pytest.raises(zmq.ZMQError) as caught:
        CollectorServer(
            running.address, KEYS.collector.public.decode(), KEYS.collector.private.decode(), KEYS.agent.public.decode()
        )
    assert caught.value.errno == zmq.EADDRINUSE


@pytest.mark.parametrize(
    ("kind", "signal", "code"),
    [
        ("clean", None, 0),
        ("crash", None, 1),
        ("preflight", None, 3),
        ("overflow", None, 4),
        ("lost", "SIGKILL", 5),
        ("hang", None, 5),
        ("interrupted", "SIGTERM", 143),
        ("interrupted", "signal 37", 165),
        ("unknown", None, 6),
    ],
)
def test_exit_codes_are_a_contract(make, kind, signal, code):
    report = build_report(fold([]), run_id="x", started=None, ended=None)
    verdict = msgspec.structs.replace(
        report.verdict, kind=VerdictKind(kind), signal=signal, missing=["rank 1 was never heard from"]
    )
    assert exit_code(msgspec.structs.replace(report, verdict=verdict)) == code


def test_a_run_that_called_no_module_does_not_exit_like_a_clean_one(make):
    ended = [body for rank in range(2) for body in make.finished(rank, batch=-1, page=-1)]
    messages = [("a0", n, body) for n, body in enumerate([make.hello(), *ended, NodeBye("ok")], 1)]
    report = build_report(fold(messages), run_id="x", started=None, ended=None)
    assert (report.verdict.kind, exit_code(report)) == ("unknown", 6)


def test_beats_are_answered_while_a_report_is_made(running, connect, make, monkeypatch):
    release = threading.Event()
    build = finish_module.build

    def slow(*arguments):
        assert release.wait(WAIT_MS / 1000)
        return build(*arguments)

    monkeypatch.setattr(finish_module, "build", slow)
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=0))))
    agent.send(encode(AgentMessage(2, NodeBye("ok"), 1)))
    while acknowledged_of(receive(agent)) < 2:
        pass
    for sent_ns in range(1, 6):
        agent.send(encode(AgentMessage(0, NodeBeat([], {}, sent_ns=sent_ns))))
        answer = receive(agent)
        assert (answer.n, answer.echo_ns) == (2, sent_ns)
    release.set()
    assert isinstance(receive(agent), JobResult)
    agent.send(encode(AgentMessage(0, AgentLeaving())))


def acknowledged_of(message) -> int:
    return message.n if isinstance(message, MessageAck) else 0


def test_a_report_that_cannot_be_made_is_told_to_the_agents(running, connect, make, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(finish_module, "build", broken)
    agent = connect()
    agent.send(encode(AgentMessage(1, make.hello_of(nproc=0))))
    final = say_goodbye(agent)
    assert (final.exit_code, final.kind) == (6, "unknown")
    assert "RuntimeError: no such thing" in final.text
    assert "gpuwatch report --again" in final.text


def test_an_agent_that_comes_back_late_is_told_the_verdict(running, connect, make, monkeypatch):
    monkeypatch.setattr(server_module, "VERDICT_PATIENCE_S", WAIT_MS / 1000)
    first = connect()
    first.send(encode(AgentMessage(1, make.hello_of(nproc=0))))
    first.send(encode(AgentMessage(2, NodeBye("ok"), 1)))
    while acknowledged_of(receive(first)) < 2:
        pass
    first.close(linger=0)  # it was stopped, or the network was
    again = connect()
    deadline = time.monotonic() + WAIT_MS / 1000
    told = None
    while not isinstance(told, JobResult) and time.monotonic() < deadline:
        again.send(encode(AgentMessage(0, NodeBeat([], {}))))
        told = decode_collector(again.recv()) if again.poll(50) else None
    assert isinstance(told, JobResult)
    again.send(encode(AgentMessage(0, AgentLeaving())))
