"""The socket that viewers look at, with the collector's CURVE keys. It waits for nobody and reads nothing.

Who is too slow misses pictures. With no viewer, no picture is made. Where its port is, and the key that opens it,
stands in a file of the run's folder, which only its user can read.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from ...core import host
from ...core.tell import tell
from ...core.wire.keys import KeyPair
from ...core.wire.view import FILE, JobView, ViewerKeys, encode_view

# When the next picture is due: once a second, and less often where making one takes long.

EVERY_S = 1.0
_SHARE = 0.02
"""So much of one processor pictures may take."""


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
        """One was made, in so much processor time."""
        self._due = now + max(EVERY_S, processor_s / _SHARE)

    def stop(self) -> None:
        """None is due any more."""
        self._due = math.inf


_MOST_WORDS = 64
"""Of viewers, in one turn: they come and go. Nothing else that they say is looked at."""


class ViewPublisher:
    """Binds beside `address`, the collector's own, on a port of its own. Raises zmq.ZMQError."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, server: KeyPair, viewer: KeyPair) -> None:
        self._socket = context.socket(zmq.XPUB)
        self._viewers = 0
        self._pace = PicturePace()
        self._file: Path | None = None
        try:
            self._socket.linger = 0
            self._socket.ipv6 = True
            self._socket.sndhwm = 4
            self._socket.maxmsgsize = 1024
            self._socket.xpub_verbose = 0
            self._socket.curve_server = True
            self._socket.curve_publickey = server.public
            self._socket.curve_secretkey = server.private
            self._socket.bind(re.sub(r":\d+$", ":*", address))
        except BaseException:
            self._socket.close()
            raise
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        everywhere = re.sub(r"^tcp://(\[::\]|0\.0\.0\.0|\*):", f"tcp://{host.host_name()}:", bound)
        self._keys = ViewerKeys(everywhere, server.public.decode(), viewer.public.decode(), viewer.private.decode())

    def tell(self, folder: Path) -> None:
        """Write down where it is, for who can read the run's folder. A disk that takes nothing costs the view alone."""
        path = folder / FILE
        with suppress(OSError):
            part = path.with_suffix(".part")
            part.unlink(missing_ok=True)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(self._keys))
            part.replace(path)
            self._file = path

    def show(self, make: Callable[[], JobView], now: float) -> None:
        """Send a picture, if somebody looks and it is time. `now` is monotonic time in seconds."""
        if not self._pace.is_due(now):
            return
        self._hear()
        if not self._viewers:
            return
        began = time.thread_time()
        try:
            picture = encode_view(make())
        except Exception as error:  # it costs the view alone
            tell(f"what a viewer sees could not be made: {type(error).__name__}: {error}")
            self._pace.stop()
            return
        with suppress(zmq.ZMQError):
            self._socket.send(picture, zmq.NOBLOCK)
        self._pace.took(time.thread_time() - began, now)

    @property
    def has_viewers(self) -> bool:
        """Whether somebody looked, when it last heard."""
        return self._viewers > 0

    def _hear(self) -> None:
        """Count who looks: \\x01 says that the first has come, \\x00 that the last has left."""
        for _ in range(_MOST_WORDS):
            try:
                word = self._socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if word == b"\x01":
                self._viewers = 1
            elif word == b"\x00":
                self._viewers = 0

    def close(self) -> None:
        """Nobody can look any more."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink()
        self._socket.close(linger=0)


def publisher(
    context: zmq.Context[zmq.Socket[bytes]], address: str, server: KeyPair, viewer: KeyPair
) -> ViewPublisher | None:
    """One that listens; None where no port can be had, which costs the view alone."""
    try:
        return ViewPublisher(context, address, server, viewer)
    except zmq.ZMQError as error:
        tell(f"nobody can look on: {error}")
        return None
