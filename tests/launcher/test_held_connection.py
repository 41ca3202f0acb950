"""The launch holds its agent's connection: the collector sees it closed once both have ended."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from gpuwatch.core.wire.pipe import ConnectionHanded
from gpuwatch.launcher.agent.handed_connection import HandedConnection
from gpuwatch.launcher.held_connection import HeldConnection
from zmq.utils.monitor import parse_monitor_message

from ..waiting import until


class Collector:
    """A ROUTER that keeps in order which connection was made, and which was closed."""

    def __init__(self, address="tcp://127.0.0.1:*"):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.socket.bind(address)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._seen = []

    def seen(self):
        """`made 0`, `made 1`, `closed 0`: connections by their numbers."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            self._seen.append((event["event"] == zmq.EVENT_ACCEPTED, event["value"]))
        numbers, found, count = {}, [], 0
        for is_made, descriptor in self._seen:
            if is_made:
                numbers[descriptor], count = count, count + 1
            found.append(f"{'made' if is_made else 'closed'} {numbers[descriptor]}")
        return found

    def sees(self, *last):
        """The events end with these."""
        return self.seen()[-len(last) :] == list(last)

    def end(self):
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)
        self.context.term()


class Agent:
    """What an agent does for its connection, and its launch for it as it hears of it."""

    def __init__(self, held, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        its_own = held.begin()
        self.connection = HandedConnection(self.socket, os.dup(its_own.fileno()), self._told)
        its_own.close()
        self._held = held
        self.handed = 0
        self.socket.connect(address)

    def _told(self, message):
        assert message == ConnectionHanded()
        self.handed += 1
        self._held.take()

    def is_held(self):
        self.connection.turn()
        return self.connection.is_held

    def end(self):
        """Nothing of it is left when this returns, as after its process has ended."""
        self.connection.close()
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.end()


@pytest.fixture
def held():
    made = HeldConnection()
    yield made
    made.close()


def test_a_connection_ends_with_the_launch_and_not_with_its_agent(collector, held):
    agent = Agent(held, collector.address)
    until(agent.is_held, "the launch to hold it")
    agent.end()
    stranger = Agent(HeldConnection(), collector.address)
    until(stranger.is_held, "another connection")
    stranger._held.close()
    stranger.end()
    until(lambda: collector.sees("closed 1"), "the end of that one", collector.seen)
    assert collector.seen() == ["made 0", "made 1", "closed 1"]
    held.close()
    until(lambda: collector.sees("closed 1", "closed 0"), "the end of the agent's", collector.seen)


def test_the_next_agents_connection_takes_the_place_of_the_one_before(collector, held):
    first = Agent(held, collector.address)
    until(first.is_held, "the launch to hold it")
    first.end()
    second = Agent(held, collector.address)
    until(second.is_held, "the launch to hold the next one")
    until(lambda: collector.sees("made 0", "made 1", "closed 0"), "the end of the first", collector.seen)
    second.end()
    held.close()
    until(lambda: collector.sees("closed 0", "closed 1"), "the end of the second", collector.seen)


def test_a_connection_to_a_collector_that_was_started_again_is_held_too(collector, held):
    agent = Agent(held, collector.address)
    until(agent.is_held, "the launch to hold it")
    collector.end()
    until(lambda: not agent.is_held(), "the end of the collector")
    collector.__init__(collector.address)
    until(agent.is_held, "the launch to hold the next one")
    assert agent.handed == 3, "handed over, given up, and handed over"
    held.close()
    agent.end()
    until(lambda: collector.sees("made 0", "closed 0"), "its end", collector.seen)


class ScriptedMonitor:
    """Tells of one event each time it is asked, after a time at which there is none."""

    def __init__(self, *events):
        self._events = list(events)

    def get_monitor_socket(self, wanted):
        return self

    def poll(self, timeout):
        if self._events and self._events[0] is None:
            self._events.pop(0)
            return False
        return bool(self._events)

    def recv_multipart(self):
        event, value = self._events.pop(0)
        return [event.to_bytes(2, "little") + value.to_bytes(4, "little"), b"tcp://"]

    def disable_monitor(self):
        pass

    def close(self, linger):
        pass


def test_a_descriptor_that_zeromq_has_closed_meanwhile_is_not_handed_over(held):
    told = []
    with Path(os.devnull).open() as another, held.begin() as its_own:
        number = another.fileno()
        events = (zmq.EVENT_CONNECTED, number), None, (zmq.EVENT_DISCONNECTED, number), None
        connection = HandedConnection(ScriptedMonitor(*events), os.dup(its_own.fileno()), told.append)
        connection.turn()
        connection.turn()
        connection.close()
    assert not told
    assert not connection.is_held


def test_a_connection_that_the_agent_gives_up_is_held_by_nobody(held):
    """As where a link is down: the launch would keep the kernel's tries for it alive."""
    ours, others = os.pipe()
    with held.begin() as its_own:
        events = (zmq.EVENT_CONNECTED, others), None, None, (zmq.EVENT_DISCONNECTED, others), None
        connection = HandedConnection(ScriptedMonitor(*events), os.dup(its_own.fileno()), lambda _: held.take())
        connection.turn()
        os.close(others)
        assert connection.is_held
        connection.turn()
        assert not connection.is_held
        assert os.read(ours, 1) == b"", "its last holder has let go"
        connection.close()
    os.close(ours)


def test_a_launch_without_a_free_descriptor_holds_nothing(held, monkeypatch):
    monkeypatch.setattr("socket.recv_fds", lambda sock, *_: (sock.recv(64), [], 0, None))
    with Path(os.devnull).open() as file, held.begin() as its_own:
        events = (zmq.EVENT_CONNECTED, file.fileno()), None, None
        connection = HandedConnection(ScriptedMonitor(*events), os.dup(its_own.fileno()), lambda _: held.take())
        connection.turn()
        connection.turn()
        assert not connection.is_held
        connection.close()


def test_without_a_launch_nothing_is_handed_over():
    connection = HandedConnection(SimpleNamespace(), -1, print)
    connection.turn()
    assert not connection.is_held
    connection.close()
