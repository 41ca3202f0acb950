"""A node agent's connection with its collector: when it sends a message, and when it sends it again. It never waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import msgspec
import zmq
from msgspec.structs import replace

from ...core.codes import Code, coded
from ...core.wire import messages
from ...core.wire.beat import NodeBeat
from ...core.wire.pipe import AgentConfig, UserNotice
from .handed_connection import HandedConnection
from .outbox import MessageOutbox

UNREACHABLE_S = 30.0
"""If nobody answers for this long, the user is notified."""
CONNECT_MS = 4000
"""How long one try takes. TCP itself waits twice as long before each retry, up to a minute once packets were lost."""
HANDSHAKE_MS = 15_000
_LINGER_MS = 1000
_MOST_LINGER_S = 3.0
"""ZeroMQ's own thread asks DNS for the collector's name, and does not end before it has an answer: a minute, maybe."""


class ForgottenMessages(Exception):
    """The collector does not know any more what it had acknowledged."""


class CollectorLink:
    """`now` is monotonic time in seconds; `tell` takes what the launch is to hear."""

    def __init__(
        self,
        config: AgentConfig,
        identity: bytes,
        tell: Callable[[msgspec.Struct], object],
        now: float,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """Many agents of one process share a `context`; else one is made here."""
        self._address = config.collector
        self._tell = tell
        self.outbox = MessageOutbox()
        self.is_looked_at = False
        """Somebody watches live."""
        self.welcomed = self.refused = False
        self._clock = ClockOffset()
        self._beats = BeatClock()
        self._resending = ResendClock(now)
        self._began = self.heard = now
        self._told_unreachable = False
        self._own_context = context is None
        self._context = context if context is not None else zmq.Context()
        self._socket = self._make_socket(config, identity)
        self._connection = HandedConnection(self._socket, config.launch_fd, tell)
        if config.collector:  # else the launch could not start one
            self._socket.connect(config.collector)
        self.fd = int(self._socket.FD)
        """For polling: readable when a message has arrived."""
        self._used = True
        """It was used since the last `hear`. Its descriptor may then hide an arrival: ZMQ_FD, zmq_getsockopt(3)."""

    def _make_socket(self, config: AgentConfig, identity: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.identity = identity
        socket.linger = 0
        socket.ipv6 = True
        socket.sndhwm = 1000
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 2000
        socket.connect_timeout = CONNECT_MS
        socket.handshake_ivl = HANDSHAKE_MS
        socket.heartbeat_ivl = 2000
        socket.heartbeat_timeout = 10000
        socket.heartbeat_ttl = 30_000
        socket.curve_serverkey = config.server_key.encode()
        socket.curve_publickey = config.public_key.encode()
        socket.curve_secretkey = config.private_key.encode()
        return socket

    def on_message(self, now: float, *, readable: bool, may_start_over: bool) -> Iterator[messages.CollectorMessage]:
        """Yield the messages that have arrived, except acknowledgements, which are handled here.

        `may_start_over`: raise ForgottenMessages where the collector's store was lost. Another agent, which the launch
        starts then, reads everything again.
        """
        if not readable and not self._used:
            return
        self._used = False
        while int(self._socket.EVENTS) & zmq.POLLIN:
            try:
                message = messages.decode_collector(self._socket.recv())
            except messages.WireError as error:
                text = f"the collector sent a message that this agent does not understand: {error.text}"
                self._tell(UserNotice(coded(text, Code.VERSIONS_APART)))
                continue
            self.heard = now
            self.welcomed = True
            self._resending.heard(now)
            if isinstance(message, messages.MessageAck):
                self._acknowledged(message, may_start_over, now)
            else:
                yield message
            if isinstance(message, messages.RunWelcome) and self._told_unreachable:
                self._tell(UserNotice(f"the collector at {self._address} answers now"))
            elif isinstance(message, messages.AgentRefused):
                self.refused = True
                text = f"the collector at {self._address} refuses this node: {message.reason}"
                self._tell(UserNotice(coded(text, Code.CLIENTS_REJECTED)))

    def _acknowledged(self, ack: messages.MessageAck, may_start_over: bool, now: float) -> None:
        self._clock.on_message(ack.echo_ns, ack.time_ns, time.time_ns())
        self._beats.answered(ack.echo_ns)
        self.is_looked_at = ack.looks
        if self.outbox.acknowledged(ack.n, ack.credit, ack.received):
            self._resending.acknowledged(now)
        if ack.resend and self.outbox.is_forgotten(ack.n):
            if may_start_over:
                raise ForgottenMessages
        elif ack.resend or self._resending.is_lost(ack.echo_ns, ack.received, now):
            self.outbox.send_again()

    def send(self, beat: Callable[[], NodeBeat], now: float) -> None:
        """Send every due message, and a beat when one is due. `beat` makes it, without its times."""
        if self.refused:
            return
        self._connection.turn()
        if not self.outbox.empty and self._resending.is_due(now):
            self.outbox.send_again()
        for number, data in self.outbox.due():
            if not self._try_send(data):
                break
            self.outbox.sent(number)
            self._resending.moved(now)
        if self._beats.is_due(now):
            sent_ns, (round_trip_ns, offset_ns) = time.time_ns(), self._clock.best or (None, None)
            self._beats.sent(sent_ns, now)
            times = {"sent_ns": sent_ns, "clock_offset_ns": offset_ns, "clock_round_trip_ns": round_trip_ns}
            whole = replace(beat(), launch_holds=self._connection.is_held, **times)
            if self._try_send(messages.encode(messages.AgentMessage(0, whole))):
                self._resending.beat(sent_ns, self.outbox.last_sent)
        is_late = now - self._began > UNREACHABLE_S and self._address and not self.welcomed
        if is_late and not self._told_unreachable:
            self._told_unreachable = True
            self._tell(
                UserNotice(
                    f"no collector answers at {self._address} after {UNREACHABLE_S:.0f} s; the training goes on and "
                    "this node's records are kept; if that is the wrong address, pass --collector tcp://HOST:PORT or "
                    f"--collector-port PORT [{Code.COLLECTOR_ENDED}]"
                )
            )

    def leave(self) -> None:
        """Say goodbye to the collector: the verdict is here."""
        self._try_send(messages.encode(messages.AgentMessage(0, messages.AgentLeaving())))

    def _try_send(self, data: bytes) -> bool:
        self._used = True
        with suppress(zmq.Again):
            self._socket.send(data, zmq.NOBLOCK)
            return True
        return False

    def close(self) -> None:
        """Let go of the socket, once it has sent what it holds."""
        self._connection.close()
        self._socket.close(linger=_LINGER_MS)
        if self._own_context:
            ending = threading.Thread(target=self._context.term, daemon=True, name="gpuwatch-zmq")
            ending.start()
            ending.join(_MOST_LINGER_S)


# When a node agent resends unacknowledged messages. No socket, no clock.
#
# One connection keeps the order. So when the collector answers a beat, every message sent before it has arrived or is
# lost: the answer says which. The agent resends after a loss, or once when the collector falls silent, but never
# because it is slow. Further copies would pile up in the socket, so from then on the agent only sends beats.

RESEND_S = 3.0
LONGEST_RESEND_S = 60.0
"""Twice as long each time, while nothing is acknowledged."""
_KEPT_BEATS = 256


class ResendClock:
    """`now` is monotonic time in seconds."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._pause_s = RESEND_S
        self._not_before = now
        self._sent_before: dict[int, int] = {}
        """By the time in a beat: the highest number that had been sent before it."""
        self._sent_in_silence = False

    def moved(self, now: float) -> None:
        """Something was sent."""
        self._last = now

    def heard(self, now: float) -> None:
        """The collector has said something."""
        self._last = now
        self._sent_in_silence = False

    def acknowledged(self, now: float) -> None:
        """Something new was acknowledged."""
        self._sent_in_silence = False
        self._pause_s = RESEND_S
        self._not_before = now

    def beat(self, sent_ns: int, number: int) -> None:
        """A beat leaves, after everything up to `number`."""
        self._sent_before[sent_ns] = number
        if len(self._sent_before) > _KEPT_BEATS:
            del self._sent_before[next(iter(self._sent_before))]

    def is_lost(self, echo_ns: int, received: int, now: float) -> bool:
        """Whether a beat is answered and something before it has not come; `received` is -1 if that is not said."""
        number = self._sent_before.pop(echo_ns, 0)
        return 0 <= received < number and now >= self._not_before and self._again(now)

    def is_due(self, now: float) -> bool:
        """Whether nothing has moved for too long, for the first time since the collector was heard."""
        if self._sent_in_silence or now - self._last <= self._pause_s:
            return False
        self._sent_in_silence = True
        return self._again(now)

    def _again(self, now: float) -> bool:
        self._last = now
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_RESEND_S)
        self._sent_before.clear()  # those beats were sent before the messages that follow
        return True


# When a node agent beats: twice a second, and less often while a collector that has too much to do owes the answer.
#
# Beats need no credit. Those of a thousand agents would wait in the collector's memory without end, and events behind
# them. No socket, no clock.

BEAT_S = 0.5
UNANSWERED_S = 2.0
"""It waits this long for an answer, then beats all the same: the beat or its answer may be lost."""


class BeatClock:
    """`now` is monotonic time in seconds."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._waits_for = 0
        """The time in the beat that has not been answered; 0: none."""

    def is_due(self, now: float) -> bool:
        """Whether to send one."""
        return self._last is None or now - self._last >= (UNANSWERED_S if self._waits_for else BEAT_S)

    def sent(self, sent_ns: int, now: float) -> None:
        """One has left, or there was no room for it."""
        self._last = now
        self._waits_for = sent_ns

    def answered(self, echo_ns: int) -> None:
        """The collector has heard the beat with this time."""
        if echo_ns == self._waits_for:
            self._waits_for = 0


# By how much the collector's clock is ahead of this host's, as NTP measures it: the quickest of many exchanges counts.
#
# offset = the collector's time - the middle between sending and hearing;  uncertain by half of the round trip

KEPT = 64
"""Exchanges that are compared: half a minute of beats, so that a clock which was set is believed soon."""


class ClockExchange(NamedTuple):
    """One question and its answer; nanoseconds."""

    round_trip_ns: int
    offset_ns: int


class ClockOffset:
    """The clock offset by the exchanges so far."""

    def __init__(self) -> None:
        self._exchanges: deque[ClockExchange] = deque(maxlen=KEPT)

    def on_message(self, sent_ns: int, theirs_ns: int, now_ns: int) -> None:
        """An answer arrived at `now_ns` to a beat sent at `sent_ns`, both by this host's clock."""
        if not sent_ns or not theirs_ns or now_ns < sent_ns:  # an older collector; a clock that was set back meanwhile
            return
        self._exchanges.append(ClockExchange(now_ns - sent_ns, theirs_ns - (sent_ns + now_ns) // 2))

    @property
    def best(self) -> ClockExchange | None:
        """The quickest exchange; None before the first."""
        return min(self._exchanges, key=lambda exchange: exchange.round_trip_ns, default=None)
