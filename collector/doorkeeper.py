"""Who may connect to the collector, and who may say something there: by the CURVE key that a client has shown."""

from __future__ import annotations

import time

import zmq

from ..core.tell import tell
from .assemble.timeline import utc


class CurveAccess:
    """ZAP callback: agents come in and speak, viewers come in, strangers do not. Who is turned away is counted.

    One thread of ZeroMQ's calls `callback`, the collector's own all else.
    """

    def __init__(self, agent_key: str, viewer_key: str = "") -> None:
        self._agent, self._viewer = agent_key.encode(), viewer_key.encode()
        self.refused = 0
        """Clients that have shown another key."""
        self.failed_handshakes = 0
        """All that did not come in: those above, and who does not speak CURVE at all."""
        self.from_viewers = 0
        """Messages of viewers, which none is to send."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key may come in."""
        allowed = key == self._agent or (key == self._viewer and key != b"")
        if not allowed:
            self.refused += 1
            _log("refused a stranger with another key", self.refused)
        return allowed

    def handshake_failed(self) -> None:
        """A connection has ended before it was one."""
        self.failed_handshakes += 1
        _log("a stranger did not get through the handshake", self.failed_handshakes)

    def may_speak(self, frame: zmq.Frame) -> bool:
        """Whether a message is of an agent; ZeroMQ has noted whose key its connection was made with."""
        if str(frame.get("User-Id")).encode() == self._agent:
            return True
        self.from_viewers += 1
        _log("a viewer has sent something, which was not read", self.from_viewers)
        return False


def _log(what: str, times: int) -> None:
    """Each 1st, 2nd, 4th ... time: one who knocks for ever fills no disk."""
    if times & (times - 1) == 0:
        tell(f"{utc(time.time())} {what}, {times} so far")
