"""What the collector's loop has of its metrics: it gives the newest picture, once a second, and waits for nobody.

An error of ours is counted, logged once, and told in the report. It costs the metrics alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from ...core.errors import UsageError
from ...core.wire.view import View
from ..log import log
from ..view.pace import Pace
from .endpoint import Endpoint
from .own_numbers import OwnNumbers

Picture = tuple[View, OwnNumbers]


class Metrics:
    """Serves them from the moment it is made, at `address`: `HOST:PORT`. Raises UsageError where it cannot."""

    def __init__(self, address: str) -> None:
        try:
            from .text import text_of
        except ImportError as error:
            raise UsageError(
                f"--metrics-port: expected prometheus_client, which writes the metrics, found none ({error}); "
                'install it with: pip install "gpuwatch-cluster[metrics]"'
            ) from error
        self._text_of = text_of
        self.faults = 0
        self._errors: set[str] = set()
        self._pace = Pace()
        self._lock = threading.Lock()
        """Of the text, which scrapes make."""
        self._counting = threading.Lock()
        self._newest: Picture | None = None
        self._written: tuple[Picture, bytes] | None = None
        host, _, port = address.rpartition(":")
        try:
            self._endpoint = Endpoint(host.strip("[]"), int(port), self._text, self._failed)
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
            log(line)

    def close(self) -> None:
        """Nobody can scrape any more."""
        self._endpoint.close()
