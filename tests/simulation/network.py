"""Sockets that an agent takes for ZeroMQ's: a message lies here until the world delivers it, or loses it."""

from __future__ import annotations

from collections import deque
from typing import Any

import zmq


class Socket:
    """One agent's DEALER and the other end of it."""

    FD = -1

    def __init__(self) -> None:
        self.to_collector: deque[bytes] = deque()
        self.to_agent: deque[bytes] = deque()
        self.is_open = True

    @property
    def EVENTS(self) -> int:
        return zmq.POLLIN if self.to_agent else 0

    def recv(self) -> bytes:
        return self.to_agent.popleft()

    def send(self, data: bytes, flags: int = 0) -> None:
        if len(self.to_collector) > 1000:
            raise zmq.Again
        self.to_collector.append(data)

    def connect(self, address: str) -> None:
        """There is one collector."""

    def close(self, linger: int = 0) -> None:
        self.is_open = False

    def lose(self) -> None:
        """The connection breaks with all that is on its way."""
        self.to_collector.clear()
        self.to_agent.clear()


class Context:
    """Makes the one socket of an agent."""

    def __init__(self) -> None:
        self.made = Socket()

    def socket(self, kind: int) -> Any:
        return self.made


class NoGpus:
    """Stands for GpuWatch on a host without any."""

    fd = None

    def settled(self, now: float) -> bool:
        return True

    def events(self) -> list[Any]:
        return []

    def samples(self) -> None:
        return None

    def _nothing(self, *now: float) -> None:
        """There is none."""

    tick = end = close = anomaly = ask_samples = _nothing
