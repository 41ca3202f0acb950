"""The agent's connection with the collector is held by its launch, too.

A connection is closed once the last process that holds it has closed it. So what the collector sees closed was not held
by an agent alone, which its launch would start again: both have ended.

    agent --a copy of the descriptor, SCM_RIGHTS--> launch (held_connection.py) --its number--> agent
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from ...core.wire.pipe import ConnectionHanded


class HandedConnection:
    """Hands each connection that a ZeroMQ socket makes to the launch at the other end of `descriptor`. Never waits.

    `tell` takes what the launch is to hear. With a `descriptor` below 0 there is no launch that could hold anything.
    """

    def __init__(self, link: zmq.Socket[bytes], descriptor: int, tell: Callable[[ConnectionHanded], object]) -> None:
        self._link, self._tell = link, tell
        self._number = 0
        """Counts the connections."""
        self._held = 0
        """The number of the last one that the launch holds."""
        self._up = -1
        """Descriptor of the connection; -1 while there is none."""
        self._is_due = False
        """It is to be handed over."""
        self._launch: socket.socket | None = None
        if descriptor < 0:
            return
        os.set_inheritable(descriptor, False)
        self._launch = socket.socket(fileno=descriptor)
        self._launch.setblocking(False)
        self._monitor = link.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)

    @property
    def is_held(self) -> bool:
        """The launch holds the connection that is up."""
        return self._up >= 0 and self._held == self._number

    def turn(self) -> None:
        """Hand over what is new, and hear what the launch holds."""
        if self._launch is None:
            return
        self._hear()
        if self._is_due:
            self._hand_over(self._launch)
        with suppress(OSError):
            while answer := self._launch.recv(64):
                self._held = int(answer)

    def _hear(self) -> bool:
        """Whether a connection was made or closed since the last call."""
        changed = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_CONNECTED:
                self._up, self._number, self._is_due, changed = event["value"], self._number + 1, True, True
            elif event["value"] == self._up:
                was_handed = not self._is_due
                self._up, self._is_due, changed = -1, False, True
                if was_handed:
                    self._give_up()
        return changed

    def _give_up(self) -> None:
        """Have the launch let go of the connection, too: as where a link is down."""
        with suppress(OSError):  # the launch is gone
            if self._launch is not None:
                self._launch.send(b"0")
                self._tell(ConnectionHanded())

    def _hand_over(self, launch: socket.socket) -> None:
        try:
            copy = os.dup(self._up)
        except OSError:  # it was closed a moment ago, or no descriptor is left: the next turn knows
            return
        try:
            if self._hear():  # ZeroMQ tells before it closes: the number may be another file's by now
                return
            socket.send_fds(launch, [str(self._number).encode()], [copy])
            self._is_due = False
        except OSError:  # the launch is gone
            self._is_due = False
            return
        finally:
            os.close(copy)
        self._tell(ConnectionHanded())

    def close(self) -> None:
        """Before the ZeroMQ socket is closed."""
        if self._launch is not None:
            self._link.disable_monitor()
            self._monitor.close(linger=0)
            self._launch.close()
            self._launch = None
