"""The port that a Prometheus scrapes: HTTP, in threads of its own, so that no scrape holds up the collector's loop.

    GET /metrics  ->  200, Prometheus's text format; 503 before the first picture

Everybody who reaches the port may read; that is 127.0.0.1 by default. It is bounded: so many scrapes at a time, each
with a deadline. The text is made once for a picture, when somebody asks for it.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_SCRAPES = 8
"""At a time. Who comes beyond it is hung up on."""
_SCRAPE_S = 10.0
"""A client that sends or takes nothing for so long is hung up on."""


class Endpoint:
    """Listens from the moment it is made. Raises OSError when the address cannot be had."""

    def __init__(
        self, host: str, port: int, text: Callable[[], bytes | None], failed: Callable[[Exception], object]
    ) -> None:
        """Both are called in other threads. `text` gives the answer, None where there is nothing yet, and raises
        nothing; `failed` is told of an error of ours.
        """
        self._server = _Server(host, port, text, failed)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="gpuwatch-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more. A scrape that goes on is left to itself."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, host: str, port: int, text: Callable[[], bytes | None], failed: Callable[[Exception], object]
    ) -> None:
        self._failed = failed
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.text = text
        self._room = threading.BoundedSemaphore(_MOST_SCRAPES)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As the base classes', without a look at the name service, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, if there is room for one."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no fault of ours."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self._failed(error)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SCRAPE_S
    server: _Server
    server_version = "gpuwatch"
    sys_version = ""

    def do_GET(self) -> None:
        """The metrics, or what there is in their place."""
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(HTTPStatus.NOT_FOUND, "expected /metrics")
            return
        text = self.server.text()
        if text is None:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "no numbers yet")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is not worth a line."""
