"""The viewer's end: hears the pictures of one run's collector. It sends nothing."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from ...core.wire.view import JobView, ViewerKeys, decode_view, read_viewer_keys

MAX_BYTES = 32 << 20


class ViewSubscriber:
    """To the collector of the run in `folder`. A collector that is started again is found again by its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._keys: ViewerKeys | None = None

    @property
    def is_shown(self) -> bool:
        """Whether a collector shows this run now, as far as its file says. Raises GpuwatchError for a damaged file."""
        return read_viewer_keys(self._folder) is not None

    def newest(self, timeout_s: float) -> JobView | None:
        """The last picture of those that have come; None if none comes in time. Raises GpuwatchError as above."""
        socket = self._connected()
        if socket is None:
            time.sleep(timeout_s)
            return None
        if not socket.poll(int(timeout_s * 1000)):
            return None
        found = None
        while socket.poll(0):
            found = decode_view(socket.recv()) or found
        return found

    def _connected(self) -> zmq.Socket[bytes] | None:
        keys = read_viewer_keys(self._folder)
        if keys != self._keys:
            self._keys = keys
            if self._socket is not None:
                self._socket.close(linger=0)
                self._socket = None
            if keys is not None:
                self._socket = self._connect(keys)
        return self._socket

    def _connect(self, keys: ViewerKeys) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.SUB)
        socket.linger = 0
        socket.ipv6 = True
        socket.rcvhwm = 4
        socket.maxmsgsize = MAX_BYTES
        socket.curve_serverkey = keys.server_key.encode()
        socket.curve_publickey = keys.public_key.encode()
        socket.curve_secretkey = keys.private_key.encode()
        socket.subscribe(b"")
        socket.connect(keys.address)
        return socket

    def close(self) -> None:
        """Look no more."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._context.term()
