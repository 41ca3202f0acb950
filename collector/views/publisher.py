"""Both ends of the socket for viewers, with the collector's CURVE keys.

The collector's end never waits and reads nothing but subscriptions. A slow viewer misses pictures. Without a viewer, no
picture is made. A file in the run's folder, which only its user can read, holds the port and its key.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

from ...core import host
from ...core.guest.own_files import write_whole
from ...core.guest.tell import tell
from ...core.wire.keys import KeyPair, set_options
from ...core.wire.messages import encode
from ...core.wire.view import (
    FILE,
    STACKS,
    STACKS_WORD_BYTES,
    JobView,
    StacksView,
    ViewerKeys,
    decode_stacks,
    decode_view,
    read_viewer_keys,
)

T = TypeVar("T")

# When the next picture is due: once a second, and less often where making one takes long.

EVERY_S = 1.0
_SHARE = 0.02
"""The share of one processor that pictures may take."""


class PicturePace:
    """`now` is monotonic time in seconds."""

    def __init__(self) -> None:
        self._due = 0.0

    def is_due(self, now: float) -> bool:
        """Whether it is time. The next time is a second later."""
        if now < self._due:
            return False
        self._due = now + EVERY_S
        return True

    def took(self, processor_s: float, now: float) -> None:
        """A picture took `processor_s` of processor time."""
        self._due = now + max(EVERY_S, processor_s / _SHARE)


_MOST_WORDS = 64
"""Subscriptions that are read in one turn. Nothing else from viewers is read."""


class ViewPublisher:
    """Binds beside `address`, the collector's own, on a port of its own. Raises zmq.ZMQError."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, server: KeyPair, viewer: KeyPair) -> None:
        self._socket = context.socket(zmq.XPUB)
        self.topics: list[bytes] = []
        """Subscriptions to stacks that wait for them."""
        self.has_viewers = False
        """Whether a viewer was subscribed at the last check."""
        self._pace = PicturePace()
        self._file: Path | None = None
        try:
            set_options(self._socket, linger=0, ipv6=True, sndhwm=4, maxmsgsize=1024, xpub_verbose=0)
            set_options(self._socket, curve_server=True, curve_publickey=server.public, curve_secretkey=server.private)
            self._socket.bind(re.sub(r":\d+$", ":*", address))
        except BaseException:
            self._socket.close()
            raise
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        everywhere = re.sub(r"^tcp://(\[::\]|0\.0\.0\.0|\*):", f"tcp://{host.host_name()}:", bound)
        self._keys = ViewerKeys(everywhere, server.public.decode(), viewer.public.decode(), viewer.private.decode())

    def announce(self, folder: Path) -> None:
        """Write the port and key into the run's folder for viewers. A full disk costs the view alone."""
        path = folder / FILE
        with suppress(OSError):
            write_whole(path, msgspec.json.encode(self._keys))
            self._file = path

    def show(self, make: Callable[[], JobView], now: float) -> None:
        """Send a picture, if there is a viewer and it is time. `now` is monotonic time in seconds."""
        if not self._pace.is_due(now):
            return
        self._hear()
        if not self.has_viewers:
            return
        began = time.thread_time()
        try:
            picture = encode(make())
        except Exception as error:  # it costs the view alone
            tell(f"the snapshot for viewers could not be made: {type(error).__name__}: {error}")
            self._pace.took(math.inf, now)
            return
        with suppress(zmq.ZMQError):
            self._socket.send(picture, zmq.NOBLOCK)
        self._pace.took(time.thread_time() - began, now)

    def answer(self, stacks: StacksView) -> None:
        """Send it to those who have asked."""
        for topic in self.topics:
            with suppress(zmq.ZMQError):
                self._socket.send(topic + encode(stacks), zmq.NOBLOCK)
        self.topics.clear()

    def _hear(self) -> None:
        """Update `topics` and `has_viewers`: \\x01: the first viewer has subscribed; \\x00: the last has left."""
        with suppress(zmq.ZMQError):
            for _ in range(_MOST_WORDS):
                word = self._socket.recv(zmq.NOBLOCK)
                if word in (b"\x00", b"\x01"):
                    self.has_viewers = word == b"\x01"
                elif word.startswith(b"\x01" + STACKS) and len(self.topics) < _MOST_WORDS:
                    self.topics.append(word[1:])

    def close(self) -> None:
        """Remove the file and close the socket."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink()
        self._socket.close(linger=0)


MAX_BYTES = 32 << 20


class ViewSubscriber(Generic[T]):
    """The viewer's end, for the run in `folder`. It reconnects to a restarted collector by its file.

    `decode` makes what was asked for with `topic` of the bytes of a message; None of others.
    """

    def __init__(self, folder: Path, topic: bytes, decode: Callable[[bytes], T | None]) -> None:
        self._folder, self._topic, self._decode = folder, topic, decode
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._keys: ViewerKeys | None = None

    @property
    def is_shown(self) -> bool:
        """Whether a collector shows this run now, as far as its file says. Raises GpuwatchError for a damaged file."""
        return read_viewer_keys(self._folder) is not None

    def newest(self, timeout_s: float) -> T | None:
        """The last one received; None if none arrives in time. Raises GpuwatchError as above."""
        keys = read_viewer_keys(self._folder)
        if keys != self._keys:
            self._disconnect()
            self._keys = keys
            if keys is not None:
                self._socket = self._connect(keys)
        if self._socket is None:
            time.sleep(timeout_s)
            return None
        found = None
        ready = self._socket.poll(int(timeout_s * 1000))
        while ready:
            found = self._decode(self._socket.recv()) or found
            ready = self._socket.poll(0)
        return found

    def _connect(self, keys: ViewerKeys) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.SUB)
        set_options(socket, linger=0, ipv6=True, rcvhwm=4, maxmsgsize=MAX_BYTES)
        server, public, private = (key.encode() for key in (keys.server_key, keys.public_key, keys.private_key))
        set_options(socket, curve_serverkey=server, curve_publickey=public, curve_secretkey=private)
        socket.subscribe(self._topic)
        socket.connect(keys.address)
        return socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def close(self) -> None:
        """Disconnect."""
        self._disconnect()
        self._context.term()


def job_viewer(folder: Path) -> ViewSubscriber[JobView]:
    """A viewer of the job's pictures."""
    return ViewSubscriber(folder, b"", decode_view)


def stacks_viewer(folder: Path) -> ViewSubscriber[StacksView]:
    """A viewer who asks for the ranks' stacks, once."""
    return ViewSubscriber(folder, STACKS + secrets.token_hex(STACKS_WORD_BYTES).encode(), decode_stacks)
