"""Order at the collector: an event is looked at before all pages that came before it, and no page is left."""

from __future__ import annotations

import gpuwatch.collector.server as server_module
import pytest
import zmq
from gpuwatch.collector.facts.fold import FactFold
from gpuwatch.collector.protocol import RunProtocol
from gpuwatch.collector.run_files import new_run
from gpuwatch.collector.server import CollectorServer, WaitingPages
from gpuwatch.collector.store import RunStore
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.messages import (
    AgentHello,
    AgentMessage,
    EventMessage,
    NodeBye,
    PageMessage,
    PageSegment,
    encode,
)

from ..known_keys import KEYS


def page(number: int) -> PageMessage:
    return PageMessage(0, 0, number, 0, number, 0, True, [PageSegment(0, 0, 0, b"", b"", b"")])


def test_they_are_looked_at_in_their_order_some_at_a_time_and_make_room_again():
    waiting, seen = WaitingPages(), []
    for number in range(200):
        waiting.put("a", number, page(number), 130_000)
    assert not waiting.has_room
    turns = 0
    while waiting:
        before = len(seen)
        waiting.drain(lambda agent, n, body: seen.append(n))
        assert 0 < len(seen) - before < 20, "the rest gets its turn"
        turns += 1
    assert seen == list(range(200))
    assert turns > 10
    assert waiting.has_room
    waiting.drain(lambda agent, n, body: seen.append(n))
    assert len(seen) == 200


@pytest.mark.parametrize("are_lost", [False, True], ids=["all have come", "pages lost with the connection"])
def test_an_event_behind_a_backlog_is_looked_at_first_and_all_is_stored(tmp_path, monkeypatch, are_lost):
    """What has come while the collector stood still, in the order in which it came: pages, then an event.

    Where the pages were lost the event comes twice: behind a gap, and when all was sent again.
    """
    where = RunPosition(0, 0, 5, 5, "Net", 5)
    anomaly = EventMessage(Anomaly(where, 0, "fc", "Linear", "forward", "output", "+inf", "float32"))
    backlog = [
        AgentHello("a.0", "h", 1, 1, 1, [], {}, "job"),
        *(page(n) for n in range(300)),
        anomaly,
        NodeBye("ok"),
    ]
    come = [
        ("a.0", message, encode(message)) for message in (AgentMessage(n, b, n - 1) for n, b in enumerate(backlog, 1))
    ]
    monkeypatch.setattr(server_module, "VERDICT_PATIENCE_S", 0.0)
    paths = new_run(tmp_path)
    store, seen = RunStore(paths.store, create=True), []

    class Noting(FactFold):
        def add(self, name, n, received):
            seen.append(received)
            super().add(name, n, received)

    server = CollectorServer(
        "tcp://127.0.0.1:*", KEYS.collector.public.decode(), KEYS.collector.private.decode(), KEYS.agent.public.decode()
    )
    turns = [[come[0], come[-2]], come[1:]] if are_lost else [come]
    monkeypatch.setattr(server._socket, "messages", lambda: turns.pop(0) if turns else [])
    protocol = RunProtocol(paths.run_id, "job")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        connect(socket, server.address)
        socket.send(b"wakes it up")
        try:
            report = server.run(paths, store, protocol, protocol.end_now, None, folded=Noting(store.page))
        finally:
            server.close()
            store.close()
    kinds = [type(body) for body in seen]
    assert kinds[: 3 + are_lost] == [AgentHello, *[EventMessage] * (1 + are_lost), NodeBye]
    assert kinds[3 + are_lost :] == [PageMessage] * 300
    assert report.verdict.kind == "overflow"
    again = RunStore(paths.store)
    stored = [type(body) for _, n, body in again.messages() if n]
    again.close()
    assert (stored.count(EventMessage), stored.count(PageMessage)) == (1, 300)


def connect(socket, address) -> None:
    socket.linger = 0
    socket.curve_serverkey = KEYS.collector.public
    socket.curve_publickey, socket.curve_secretkey = KEYS.agent.public, KEYS.agent.private
    socket.connect(address)
