"""What the collector's loop has of its metrics: it gives the newest picture, once a second, and waits for nobody.

An error of ours is counted, logged once, and told in the report. It costs the metrics alone.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from msgspec.structs import replace

from ...core.errors import UsageError
from ...core.tell import tell
from ...core.wire.view import JobView
from .own_numbers import OwnNumbers
from .publisher import PicturePace

# The port that a Prometheus scrapes: HTTP, in threads of its own, so that no scrape holds up the collector's loop.
#
# GET /metrics  ->  200, Prometheus's text format; 503 before the first picture
#
# Everybody who reaches the port may read; that is 127.0.0.1 by default. It is bounded: so many scrapes at a time, each
# with a deadline. The text is made once for a picture, when somebody asks for it.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_SCRAPES = 8
"""At a time. Who comes beyond it is hung up on."""
_SCRAPE_S = 10.0
"""A client that sends or takes nothing for so long is hung up on."""


class MetricsEndpoint:
    """Listens from the moment it is made. Raises OSError when the address cannot be had."""

    def __init__(
        self, host: str, port: int, text: Callable[[], bytes | None], failed: Callable[[Exception], object]
    ) -> None:
        """Both are called in other threads. `text` gives the answer, None where there is nothing yet, and raises
        nothing; `failed` is told of an error of ours.
        """
        self._server = _MetricsServer(host, port, text, failed)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="gpuwatch-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more. A scrape that goes on is left to itself."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, host: str, port: int, text: Callable[[], bytes | None], failed: Callable[[Exception], object]
    ) -> None:
        self._failed = failed
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.text = text
        self._room = threading.BoundedSemaphore(_MOST_SCRAPES)
        super().__init__((host, port), _ScrapeHandler)

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


class _ScrapeHandler(BaseHTTPRequestHandler):
    timeout = _SCRAPE_S
    server: _MetricsServer
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


Picture = tuple[JobView, OwnNumbers]


class MetricsExporter:
    """Serves them from the moment it is made, at `address`: `HOST:PORT`. Raises UsageError where it cannot."""

    def __init__(self, address: str) -> None:
        try:
            from .metrics_text import text_of
        except ImportError as error:
            raise UsageError(
                f"--metrics-port: expected prometheus_client, which writes the metrics, found none ({error}); "
                'install it with: pip install "gpuwatch-cluster[metrics]"'
            ) from error
        self._text_of = text_of
        self.faults = 0
        self._errors: set[str] = set()
        self._pace = PicturePace()
        self._lock = threading.Lock()
        """Of the text, which scrapes make."""
        self._counting = threading.Lock()
        self._newest: Picture | None = None
        self._written: tuple[Picture, bytes] | None = None
        host, _, port = address.rpartition(":")
        try:
            self._endpoint = MetricsEndpoint(host.strip("[]"), int(port), self._text, self._failed)
        except OSError as error:
            raise UsageError(
                f"--metrics-port: expected an address that is free, found {address}: {error.strerror or error}; pass "
                "another [HOST:]PORT"
            ) from error
        self.url = f"http://{host}:{self._endpoint.port}/metrics"

    def show(self, make: Callable[[], Picture], now: float) -> None:
        """Take the newest picture, if it is time. `now` is monotonic time in seconds."""
        if not self._pace.is_due(now):
            return
        began = time.thread_time()
        try:
            self._newest = make()
        except Exception as error:
            self._failed(error)
        self._pace.took(time.thread_time() - began, now)

    def conclude(self, kind: str) -> None:
        """The verdict is there."""
        newest = self._newest
        if newest is not None:
            self._newest = replace(newest[0], kind=kind), newest[1]

    def _text(self) -> bytes | None:
        """Of the newest picture, in the thread of a scrape; None where there is none, or it cannot be written."""
        with self._lock:
            newest = self._newest
            if newest is None:
                return None
            if self._written is None or self._written[0] is not newest:
                try:
                    self._written = newest, self._text_of(*newest)
                except Exception as error:
                    self._failed(error)
                    return None
            return self._written[1]

    def _failed(self, error: Exception) -> None:
        line = f"the metrics could not be told: {type(error).__name__}: {error}"
        with self._counting:
            self.faults += 1
            is_new = line not in self._errors
            self._errors.add(line)
        if is_new:
            tell(line)

    def close(self) -> None:
        """Nobody can scrape any more."""
        self._endpoint.close()
