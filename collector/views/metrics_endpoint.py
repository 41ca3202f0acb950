"""The port that a Prometheus scrapes: HTTP, in threads of its own, so that no scrape holds up the collector's loop.

    GET /metrics  ->  200, Prometheus's text format; 503 before the first picture

The loop supplies the newest picture once a second and never waits. An error of gpuwatch is counted, logged once, and in
the report. It costs the metrics alone.

Everybody who reaches the port may read; it is on 127.0.0.1 by default. The number of concurrent scrapes is bounded, and
each has a deadline. The text of a picture is made once, on the first scrape.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from msgspec.structs import replace
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...core.codes import Code, VerdictKind
from ...core.errors import UsageError
from ...core.guest.tell import tell
from ...core.wire.view import JobView, RankView, ViewStraggler
from ..report.model import label_of
from .publisher import PicturePace
from .snapshot import STATES, behind_of, state_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_SCRAPES = 8
"""Concurrent scrapes. The server hangs up on any more."""
_SCRAPE_S = 10.0
"""The server hangs up on a client that sends or takes nothing for this long."""


@dataclass(frozen=True)
class OwnNumbers:
    """Numbers of the collector itself."""

    waiting_messages: int = 0
    """Received messages that are not on the disk yet."""
    waiting_bytes: int = 0
    pages_not_kept: int = 0
    turned_away: dict[str, int] = field(default_factory=dict)
    """reason -> clients or messages that were refused"""
    metrics_faults: int = 0


Picture = tuple[JobView, OwnNumbers]


class MetricsExporter:
    """Serves metrics from its construction, at `address`: `HOST:PORT`. Raises UsageError if that fails."""

    def __init__(self, address: str) -> None:
        self.faults = 0
        self._errors: set[str] = set()
        self._pace = PicturePace()
        self._lock = threading.Lock()
        """Guards the text, which scrapes make in their threads."""
        self._counting = threading.Lock()
        self._newest: Picture | None = None
        self._written: tuple[Picture, bytes] | None = None
        host, _, port = address.rpartition(":")
        try:
            self._server = _MetricsServer(host.strip("[]"), int(port), self)
        except OSError as error:
            found = f"found {address}: {error.strerror or error}; pass another [HOST:]PORT"
            raise UsageError(
                Code.ADDRESS_IN_USE, f"--metrics-port: expected an address that is free, {found}"
            ) from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="gpuwatch-metrics", daemon=True)
        self._thread.start()

    def show(self, make: Callable[[], Picture], now: float) -> None:
        """Take the newest picture, if it is time. `now` is monotonic time in seconds."""
        if not self._pace.is_due(now):
            return
        began = time.thread_time()
        try:
            self._newest = make()
        except Exception as error:
            self.failed(error)
        self._pace.took(time.thread_time() - began, now)

    def conclude(self, kind: str) -> None:
        """Publish the kind of the final verdict."""
        newest = self._newest
        if newest is not None:
            self._newest = replace(newest[0], kind=kind), newest[1]

    def text(self) -> bytes | None:
        """The newest picture as text, made in a scrape's thread; None if there is none, or it cannot be written."""
        with self._lock:
            newest = self._newest
            if newest is None:
                return None
            if self._written is None or self._written[0] is not newest:
                try:
                    self._written = newest, text_of(*newest)
                except Exception as error:
                    self.failed(error)
                    return None
            return self._written[1]

    def failed(self, error: Exception) -> None:
        """Count an error of gpuwatch, and log it once. Scrapes call this in their threads, too."""
        line = f"the metrics could not be computed: {type(error).__name__}: {error}"
        with self._counting:
            self.faults += 1
            is_new = line not in self._errors
            self._errors.add(line)
        if is_new:
            tell(line)

    def close(self) -> None:
        """Close the port. Running scrapes are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, exporter: MetricsExporter) -> None:
        self.exporter = exporter
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._room = threading.BoundedSemaphore(_MOST_SCRAPES)
        super().__init__((host, port), _ScrapeHandler)

    def server_bind(self) -> None:
        """As in the base classes, without the lookup in the name service, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the request, unless `_MOST_SCRAPES` are running."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no fault of gpuwatch."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self.exporter.failed(error)


class _ScrapeHandler(BaseHTTPRequestHandler):
    timeout = _SCRAPE_S
    server: _MetricsServer
    server_version = "gpuwatch"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(HTTPStatus.NOT_FOUND, "expected /metrics")
            return
        text = self.server.exporter.text()
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


# From the picture that `gpuwatch top` shows to Prometheus's text format.
#
# gpuwatch_rank_batches_total{host="node-a",rank="3"} 813.0
# gpuwatch_module_headroom{dtype="float16",module="net.fc2"} 1.1
#
# A rank has four series, and six with a GPU, whatever its model. Only the few modules of the run that are closest to
# their limit have series.

_RANK = ("rank", "host")
_MODULE = ("module", "dtype")


@dataclass
class _CollectedMetrics(Collector):
    view: JobView
    own: OwnNumbers

    def collect(self) -> Iterator[Metric]:
        return families(self.view, self.own)


def text_of(view: JobView, own: OwnNumbers) -> bytes:
    """Prometheus's text format, version 0.0.4."""
    return generate_latest(_CollectedMetrics(view, own))


Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def families(view: JobView, own: OwnNumbers) -> Iterator[Metric]:
    """All metrics; one without a known value has no sample."""
    run = {"run": view.run, "attempt": str(view.attempt)}
    yield InfoMetricFamily("gpuwatch_run", "The run that this collector watches.", run)
    silent = sum(node.lost for node in view.nodes)
    for name, text, number in (
        ("gpuwatch_view_timestamp_seconds", "Unix time of these numbers.", view.time_ns / 1e9),
        ("gpuwatch_world_size", "Ranks of the job.", view.world_size),
        ("gpuwatch_nodes", "Nodes of the job that have reported.", len(view.nodes)),
        ("gpuwatch_nodes_silent", "Nodes of the job that are silent now.", silent),
    ):
        yield GaugeMetricFamily(name, text, value=number)
    yield from _ranks(view)
    yield from _modules(view)
    yield _by_label(CounterMetricFamily, "gpuwatch_events", "Events by kind.", "kind", view.events_by_kind)
    values = {value: view.anomalies_by_value.get(value, 0) for value in ("nan", "+inf", "-inf")}
    yield _by_label(CounterMetricFamily, "gpuwatch_anomalies", "Anomalies.", "value", values)
    text = "Records dropped because there was no room for them."
    yield _by_label(CounterMetricFamily, "gpuwatch_lost", text, "what", view.lost)
    kinds = {str(kind): int(kind == view.kind) for kind in VerdictKind}
    yield _by_label(GaugeMetricFamily, "gpuwatch_verdict", "1: the verdict so far.", "kind", kinds)
    text = "Received, but not on the disk yet."
    yield GaugeMetricFamily("gpuwatch_collector_waiting_messages", text, value=own.waiting_messages)
    yield GaugeMetricFamily("gpuwatch_collector_waiting_bytes", text, value=own.waiting_bytes)
    text = "Pages not kept because memory and disk were short."
    yield CounterMetricFamily("gpuwatch_collector_pages_not_kept", text, value=own.pages_not_kept)
    text = "Messages and clients that the collector rejected."
    yield _by_label(CounterMetricFamily, "gpuwatch_collector_turned_away", text, "reason", own.turned_away)
    text = "How often these metrics could not be computed."
    yield CounterMetricFamily("gpuwatch_metrics_faults", text, value=own.metrics_faults)


def _ranks(view: JobView) -> Iterator[Metric]:
    behind = behind_of(view)
    states = {rank.rank: state_of(rank, behind) for rank in view.ranks}
    number = Counter(states.values())
    by_state = {str(state): number[state] for state in STATES}
    yield _by_label(GaugeMetricFamily, "gpuwatch_ranks", "Ranks by state.", "state", by_state)
    states.update({process.rank: state_of(process, set()) for process in view.processes})
    everyone = [*view.ranks, *view.processes]
    in_state = (([label_of(rank.rank), rank.host, states[rank.rank]], 1) for rank in everyone)
    text = "1: the state that the rank is in."
    yield _family(GaugeMetricFamily, "gpuwatch_rank_state", text, (*_RANK, "state"), in_state)
    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    batches = [(rank, max(0, rank.batch + 1)) for rank in everyone]
    yield _of_ranks(counter, "gpuwatch_rank_batches", "Batches that the rank has started.", batches)
    steps = [(rank, max(0, rank.step)) for rank in everyone]
    yield _of_ranks(counter, "gpuwatch_rank_steps", "Optimizer steps that it has finished.", steps)
    still = [(rank, rank.still_s) for rank in everyone if not rank.ended]
    yield _of_ranks(gauge, "gpuwatch_rank_still_seconds", "Seconds since the rank last recorded something.", still)
    use = [(rank, rank.gpu_use) for rank in view.ranks if rank.gpu_use >= 0]
    text = "Share of the time in which a kernel ran on the rank's GPU."
    yield _of_ranks(gauge, "gpuwatch_rank_gpu_use_share", text, use)
    memory = [(rank, rank.gpu_memory) for rank in view.ranks if rank.gpu_memory >= 0]
    yield _of_ranks(gauge, "gpuwatch_rank_gpu_memory_share", "Share of its GPU's memory in use.", memory)
    slow = [(view.slow, view.slow.cost)] if view.slow is not None else []
    text = "Share of the job's time that the others wait for this rank."
    yield _of_ranks(gauge, "gpuwatch_straggler_share", text, slow)


def _of_ranks(kind: Family, name: str, text: str, of: Iterable[tuple[RankView | ViewStraggler, float]]) -> Metric:
    return _family(kind, name, text, _RANK, (([label_of(rank.rank), rank.host], number) for rank, number in of))


def _modules(view: JobView) -> Iterator[Metric]:
    gauge = GaugeMetricFamily
    text = "Powers of two from its output's abs max to its dtype's limit."
    left = (([hot.module, hot.dtype], hot.left) for hot in view.hot)
    yield _family(gauge, "gpuwatch_module_headroom", text, _MODULE, left)
    text = "Largest absolute value of its output in the last batch."
    largest = (([hot.module, hot.dtype], hot.abs_max) for hot in view.hot)
    yield _family(gauge, "gpuwatch_module_abs_max", text, _MODULE, largest)
    text = "Batch in which its output is forecast to pass its dtype's limit."
    bounds = {"earliest": "earliest", "middle": "batch", "latest": "latest"}
    passing = (([p.module, p.dtype, bound], getattr(p, name)) for p in view.passing for bound, name in bounds.items())
    yield _family(gauge, "gpuwatch_forecast_batch", text, (*_MODULE, "bound"), passing)


def _by_label(kind: Family, name: str, text: str, label: str, of: dict[str, int]) -> Metric:
    return _family(kind, name, text, (label,), (([value], number) for value, number in of.items()))


def _family(
    kind: Family, name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[list[str], float]]
) -> Metric:
    found = kind(name, text, labels=labels)
    for values, number in samples:
        found.add_metric(values, number)
    return found
