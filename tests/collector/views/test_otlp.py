"""`gpuwatch export --format otlp`, to a real HTTP server that decodes what it is sent."""

from __future__ import annotations

from collections import defaultdict

import pytest
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.errors import UsageError
from gpuwatch.core.recorder.layout import PARTS
from gpuwatch.core.wire.messages import NodeBeat

from ...webhooks import serve
from .test_trace import BEGAN_NS, STEPS, timed

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs OpenTelemetry's exporter")

from gpuwatch.collector.views import otlp_export
from gpuwatch.collector.views.otlp_export import send_otlp
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

assert serve


@pytest.fixture
def facts(make):
    """Two nodes; rank 0 and rank 1 on the first one, whose clock is 7 s behind the collector's."""
    bodies = [
        ("a0", make.hello("a0")),
        ("a0", timed(make, 0)),
        ("a0", timed(make, 1)),
        ("a0", make.telemetry({("", "cpu"): [0.0, 0.5, 1.5], ("rank 1", "rank_cpu"): [0.0, 0.2, 0.4]})),
        *(("a0", body) for body in make.finished(0)),
        ("a0", NodeBeat([], {}, 5, 7_000_000_000, 1000)),
        ("a1", make.hello("a1", host="beta")),
        ("a1", make.telemetry({("GPU-1", "power"): [300.0, 310.0]})),
    ]
    return fold((agent, number, body) for number, (agent, body) in enumerate(bodies, 1))


def heard(server):
    """(host, metric, sorted attributes) -> [(ns, number)]"""
    found = defaultdict(list)
    for path, request in server.heard:
        assert path == "/v1/metrics"
        for of in request.resource_metrics:
            resource = {each.key: each.value.string_value for each in of.resource.attributes}
            assert (resource["service.name"], resource["gpuwatch.run"]) == ("gpuwatch", "night")
            for metric in of.scope_metrics[0].metrics:
                for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points:
                    with_labels = tuple(sorted((each.key, each.value.string_value) for each in point.attributes))
                    key = (resource["host.name"], metric.name, with_labels)
                    found[key].append((point.time_unix_nano, point.as_double or point.as_int))
    return dict(found)


def test_figures_of_nodes_and_steps_of_ranks_arrive_on_the_collectors_clock(facts, serve):
    server = serve(read=ExportMetricsServiceRequest.FromString)
    sent = send_otlp(facts, "night", server.address.replace("/hooks/a-secret", "/"))
    found = heard(server)
    assert sent == sum(map(len, found.values()))
    assert [value for _, value in found["beta", "gpuwatch_node_power", (("device", "GPU-1"),)]] == [300, 310]
    cpu = [value for _, value in found["h0", "gpuwatch_node_cpu", ()]]
    assert cpu == pytest.approx([0.1, 0.2]), "a count is its growth in a second"
    assert [value for _, value in found["h0", "gpuwatch_rank_cpu", (("rank", "1"),)]] == pytest.approx([0.04, 0.04])
    forward = found["h0", "gpuwatch_rank_step_seconds", (("attempt", "0"), ("part", "forward"), ("rank", "1"))]
    seconds = [step.parts[PARTS.index("forward")] / 1e9 for step in STEPS]
    assert [value for _, value in forward] == pytest.approx(seconds, 1e-3)
    assert forward[0][0] == BEGAN_NS + 7_000_000_000
    ((_, steps),) = found["h0", "gpuwatch_rank_steps_total", (("attempt", "0"), ("rank", "0"))]
    assert steps == facts.ranks[0, 0].state.step


def test_one_rank_has_its_own_figures_and_its_node(facts, serve):
    server = serve(read=ExportMetricsServiceRequest.FromString)
    send_otlp(facts, "night", server.address.replace("/hooks/a-secret", "/v1/metrics"), [0])
    assert {host for host, _, _ in heard(server)} == {"h0"}
    assert {dict(labels).get("rank", "0") for _, _, labels in heard(server)} == {"0"}


def test_many_points_are_several_requests(facts, serve, monkeypatch):
    whole = serve(read=ExportMetricsServiceRequest.FromString)
    send_otlp(facts, "night", whole.address.replace("/hooks/a-secret", ""))
    monkeypatch.setattr(otlp_export, "_MOST_POINTS", 3)
    parts = serve(read=ExportMetricsServiceRequest.FromString)
    send_otlp(facts, "night", parts.address.replace("/hooks/a-secret", ""))
    assert len(parts.heard) > len(whole.heard)
    assert heard(parts) == heard(whole)


def test_an_endpoint_that_refuses_is_one_sentence(facts, serve, capfd):
    server = serve(400, read=bytes)
    with pytest.raises(UsageError, match=r"--endpoint: expected one that takes metrics, found http://127.*400"):
        send_otlp(facts, "night", server.address.replace("/hooks/a-secret", ""))
    assert capfd.readouterr() == ("", "")
