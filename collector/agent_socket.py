"""The collector's socket: a ROUTER with CURVE. A client's key decides whether it may connect, and send.

A client without the job's keys fails the handshake. Malformed messages of other clients are counted and not answered.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from ..core.guest.tell import tell
from ..core.wire import messages as wire
from ..core.wire.keys import KeyPair, agent_name, set_options
from .assemble.timeline import utc

_LINGER_MS = 3000
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_BACKLOG = 4096
"""After this process was stopped for a while, all agents reconnect at once."""
_BATCH = 2048
_BATCH_BYTES = 16 << 20
"""One turn takes this many messages at most, and stops after this many bytes of them."""


class CurveAccess:
    """ZAP callback: agents may connect and send, viewers may connect, others are refused and counted.

    A thread of ZeroMQ calls `callback`; the collector's own thread calls the rest.
    """

    def __init__(self, agent_key: str, viewer_key: str = "") -> None:
        self._agent, self._viewer = agent_key.encode(), viewer_key.encode()
        reasons = "refused", "failed_handshakes", "from_viewers", "replayed", "malformed", "disbelieved"
        self.turned_away = dict.fromkeys(reasons, 0)
        """reason -> count. `failed_handshakes` includes the refused ones; the protocol counts `replayed` and
        `disbelieved`."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key may connect."""
        allowed = key == self._agent or (key == self._viewer and key != b"")
        if not allowed:
            self.count("refused", "refused a stranger with another key")
        return allowed

    def may_speak(self, frame: zmq.Frame) -> bool:
        """Whether an agent sent a message; ZeroMQ has recorded the key of its connection."""
        if str(frame.get("User-Id")).encode() == self._agent:
            return True
        self.count("from_viewers", "ignored what a viewer sent")
        return False

    def count(self, reason: str, what: str) -> None:
        """Count, and log each 1st, 2nd, 4th ... time, so that a client which retries for ever fills no disk."""
        self.turned_away[reason] += 1
        times = self.turned_away[reason]
        if times & (times - 1) == 0:
            tell(f"{utc(time.time())} {what}, {times} so far")


class AgentSocket:
    """Listens from the moment it is made. Raises zmq.ZMQError when the address cannot be bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], bind: str, keys: KeyPair, access: CurveAccess) -> None:
        self._access = access
        self._routes: dict[str, bytes] = {}
        """agent -> the ZeroMQ identity to send to, for accepted agents"""
        self._speaking = ("", b"")
        """(name, identity) of the last sender, accepted or not"""
        self._connections: dict[int, str] = {}
        """descriptor -> the agent that was last heard there, accepted or not"""
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=access)
        self.socket = context.socket(zmq.ROUTER)
        try:
            set_options(self.socket, linger=_LINGER_MS, ipv6=True, maxmsgsize=wire.MAX_MESSAGE_BYTES, rcvhwm=1000)
            # no heartbeats of its own: libzmq 4.3.5 aborts in their timer where input has stopped and its connection
            # breaks (stream_engine_base.cpp, `!_io_error`). The agents beat, and say how long a beat counts
            set_options(self.socket, backlog=_BACKLOG, router_handover=True, tcp_keepalive=1, tcp_keepalive_idle=30)
            set_options(self.socket, curve_server=True, curve_publickey=keys.public, curve_secretkey=keys.private)
            self._monitor = self.socket.get_monitor_socket(_HANDSHAKE_FAILURES | zmq.EVENT_DISCONNECTED)
            self.socket.bind(bind)
        except BaseException:
            self.close()
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def messages(self) -> Iterator[tuple[str, wire.AgentMessage, bytes]]:
        """Yield received messages and skip malformed ones; stop after a bounded number, so that other work runs."""
        taken = 0
        for _ in range(_BATCH):
            if taken > _BATCH_BYTES:
                return
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            taken += sum(map(len, parts))
            if not self._access.may_speak(parts[-1]):
                continue
            try:
                identity, data = (part.bytes for part in parts)
                self._speaking = agent_name(identity), identity
                with suppress(zmq.ZMQError):  # it has none
                    self._connections[int(parts[-1].get(zmq.SRCFD))] = self._speaking[0]
                yield self._speaking[0], wire.decode_agent(data), data
            except (wire.WireError, ValueError):  # of more parts, or of fewer
                self._access.turned_away["malformed"] += 1

    def take_in(self, agent: str) -> None:
        """Accept the last sender as this agent of the job: messages can be sent to it from now on."""
        self._routes[agent] = self._speaking[1]

    def send(self, agent: str, message: wire.CollectorMessage) -> None:
        """Send to an accepted agent or to the last sender.

        Raises nothing for an agent that is gone or does not read: it asks again when it is back.
        """
        identity = self._speaking[1] if agent == self._speaking[0] else self._routes.get(agent)
        if identity is not None:  # else a collector before this one has heard it: it has not spoken since
            with suppress(zmq.ZMQError):
                self.socket.send_multipart([identity, wire.encode(message)], zmq.NOBLOCK)

    def closed_connections(self) -> Iterator[str]:
        """Yield the agents whose connections were closed since the last call, and count the handshakes that failed."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] != zmq.EVENT_DISCONNECTED:
                self._access.count("failed_handshakes", "a stranger did not get through the handshake")
            elif (agent := self._connections.pop(event["value"], None)) is not None:
                yield agent

    def close(self) -> None:
        """Let the last messages out, then close."""
        if hasattr(self, "_monitor"):
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
        self.socket.close()
        self._authenticator.stop()
