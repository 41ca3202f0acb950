"""The launch holds the connection of its agent with the collector, and does nothing else with it.

See agent/handed_connection.py. An agent that has ended leaves it open until the agent after it has made another.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress


class HeldConnection:
    """Takes the connections of one agent after the other. It never waits. For one thread at a time."""

    def __init__(self) -> None:
        self._connection = -1
        """Descriptor; -1: none."""
        self._agent: socket.socket | None = None

    def begin(self) -> socket.socket | None:
        """An agent is about to be started. Returns what is to be its own, its `launch_fd`; None if it can have none."""
        self._leave_agent()
        try:
            self._agent, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        self._agent.setblocking(False)
        return its_own

    def take(self) -> None:
        """The agent has handed a connection over, which is held in place of the one before, or has given it up."""
        agent = self._agent
        if agent is None:
            return
        with suppress(OSError):  # the agent has ended
            number, descriptors, _, _ = socket.recv_fds(agent, 64, 1, socket.MSG_CMSG_CLOEXEC)
            self._release()
            if descriptors:  # else the agent has given its connection up, or there was none left
                self._connection = descriptors[0]
                agent.send(number)

    def close(self) -> None:
        """Let go of it."""
        self._leave_agent()
        self._release()

    def _leave_agent(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _release(self) -> None:
        held, self._connection = self._connection, -1
        if held >= 0:
            with suppress(OSError):
                os.close(held)
