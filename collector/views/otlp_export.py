"""The figures of nodes and ranks over time, sent to an OpenTelemetry collector: OTLP over HTTP, by its own SDK."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from ...core.errors import Code, UsageError
from ...core.recorder.layout import PARTS
from ...core.wire.columns import METRICS
from ..assemble.timeline import offset_ns, series_of_all
from ..decide.decide import decide
from ..facts.facts import RankFacts, RunFacts
from .trace_export import sampled_steps

_PATH = "/v1/metrics"
_MOST_POINTS = 10_000
"""In one request."""


class OtlpSeries(NamedTuple):
    """One metric with one set of attributes. `points` are (nanoseconds by the collector's clock, number)."""

    name: str
    text: str
    unit: str
    attributes: dict[str, str]
    points: list[tuple[int, float]]
    counts: bool = False


def send_otlp(facts: RunFacts, run: str, endpoint: str, ranks: Collection[int] | None = None) -> int:
    """Send the metrics of all nodes and ranks, or of some ranks and their nodes, to `http://HOST:4318`.

    Returns the number of points. Raises UsageError if the endpoint does not take them.
    """
    said = _FirstMessage()
    logger = logging.getLogger("opentelemetry")
    exporter = OTLPMetricExporter(endpoint.rstrip("/").removesuffix(_PATH) + _PATH)
    logger.addHandler(said)
    propagated, logger.propagate = logger.propagate, False
    verdict, shown, sent = decide(facts), facts.only(ranks), 0
    try:
        for agent, node in shown.nodes.items():
            resource = Resource.create({"service.name": "gpuwatch", "gpuwatch.run": run, "host.name": node.name})
            for metrics in _requests(_series(shown, agent, verdict.kind)):
                scope = ScopeMetrics(InstrumentationScope("gpuwatch"), metrics, "")
                data = MetricsData([ResourceMetrics(resource, [scope], "")])
                if exporter.export(data) is not MetricExportResult.SUCCESS:
                    raise UsageError(
                        Code.NOT_TAKEN, f"--endpoint: expected one that takes metrics, found {endpoint}: {said.text}"
                    )
                sent += sum(len(metric.data.data_points) for metric in metrics)
        return sent
    finally:
        logger.propagate = propagated
        logger.removeHandler(said)
        exporter.shutdown()


class _FirstMessage(logging.Handler):
    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


def _requests(series: Iterator[OtlpSeries]) -> Iterator[list[Metric]]:
    found: list[Metric] = []
    points = 0
    for one in series:
        for at in range(0, len(one.points), _MOST_POINTS):
            part = one.points[at : at + _MOST_POINTS]
            if points + len(part) > _MOST_POINTS:
                yield found
                found, points = [], 0
            data = [NumberDataPoint(one.attributes, 0, time_ns, value) for time_ns, value in part]
            kind = Sum(data, AggregationTemporality.CUMULATIVE, True) if one.counts else Gauge(data)
            found.append(Metric(one.name, one.text, one.unit, kind))
            points += len(part)
    if found:
        yield found


def _series(facts: RunFacts, agent: str, verdict: str) -> Iterator[OtlpSeries]:
    series = series_of_all(facts, 0).get(agent)
    for of, what, figure in series.figures(facts) if series is not None else ():
        metric = METRICS.get(what)
        text, unit = (metric.text, metric.unit) if metric is not None else (what, "")
        points = [
            (int(at_s * 1e9), float(value))
            for at_s, value in zip(figure.at_s, figure.shown, strict=True)
            if math.isfinite(value)
        ]
        kind, _, number = of.rpartition(" ")
        if kind == "rank":
            yield OtlpSeries(f"gpuwatch_rank_{what.removeprefix('rank_')}", text, unit, {"rank": number}, points)
        else:
            yield OtlpSeries(f"gpuwatch_node_{what}", text, unit, {"device": of} if of else {}, points)
    for rank in facts.ranks.values():
        if rank.agent == agent:
            yield from _of_rank(rank, offset_ns(facts.nodes[agent]), verdict)


def _of_rank(rank: RankFacts, offset: int, verdict: str) -> Iterator[OtlpSeries]:
    own = {"rank": str(rank.rank), "attempt": str(rank.attempt)}
    steps = list(sampled_steps(rank))
    for at, part in enumerate(PARTS):
        points = [(began_ns + offset, seconds[at]) for _, began_ns, seconds in steps]
        yield OtlpSeries("gpuwatch_rank_step_seconds", "Time of a part of a step", "s", {**own, "part": part}, points)
    if rank.exit is None:
        return
    at_ns = (rank.exit.ended_ns or rank.exit.where.time_ns) + offset
    for name, text, number in (
        ("batches", "Batches that the rank has begun", rank.counts.batch + 1),
        ("steps", "Optimizer steps that it has finished", rank.counts.step),
        ("anomalies", "Batches in which it found nan or inf", len(rank.anomalies)),
    ):
        yield OtlpSeries(f"gpuwatch_rank_{name}_total", text, "", own, [(at_ns, number)], counts=True)
    yield OtlpSeries("gpuwatch_verdict", "1: the verdict of the run", "", {**own, "kind": verdict}, [(at_ns, 1)])
