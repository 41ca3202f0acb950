"""Whatever a node with the job's key sends: the collector goes on, and its report is written."""

from __future__ import annotations

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import FactFold, fold
from gpuwatch.collector.protocol import RunProtocol
from gpuwatch.collector.report.model import to_json
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.collector.run_actions import StoreMessage
from gpuwatch.collector.stage_lines import StageLines
from gpuwatch.core.events.agent_events import (
    LimitForecast,
    StoppedGradient,
    UnmovedParts,
    UnmovedWeights,
    ZeroedGradients,
)
from gpuwatch.core.events.alarms import IgnoredAlarm, RangeWarning, ScalerSkip
from gpuwatch.core.events.node_events import GpuCounters, GpuHealth, GpuXid, NodeSignal
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.events.preflight_events import BandwidthRows, PreflightResult
from gpuwatch.core.wire.messages import AgentMessage, EventMessage, WireError, decode_agent, encode
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def wires(make) -> list[bytes]:
    """A job of two ranks with everything in it, as it goes over the wire."""
    batch = make.Batch(1, batch=1)
    batch.call("fc", "Linear", given=[batch.tensor()], returned=[batch.tensor(make.INF)], depth=1)
    place = make.where(1, batch=1)
    events = [
        RangeWarning(place, "near overflow", "up", "Linear", "forward", "output", "float16", 6e4, 0.2),
        ScalerSkip(place, 2.0, 1, "up", "Linear", "grad output", "+inf"),
        IgnoredAlarm(place, "p*", "p", "output", "+inf"),
        OwnFault(place, "hook", "x"),
        LimitForecast(place, "up", "Linear", "float16", 65504.0, 4e3, 40, 30, 60),
        ZeroedGradients(place, 2, 20, 9, "up", "Linear", "grad weight", "float32", 3e19, 4e19, 5e19),
        UnmovedWeights(place, 16, 40, 2, "up", "Linear", "weight", "float32", 0.5, 0.001),
        StoppedGradient(place, 16, 40, "up", "Linear", "act", "ReLU", "", "", 102.0, 0.0, 0.0, 0.25),
        UnmovedParts(place, 40, 52, 3, ["up.weight"], "float32", 0.5, 0.01),
        BandwidthRows(place, []),
        PreflightResult(place, "ok", findings=[make.found("compute")]),
        NodeSignal(15, 5),
        GpuXid("GPU-0", 79, 5),
        GpuCounters("GPU-0", "before", {"ecc": 1}),
        GpuHealth("ok", devices={"GPU-0": "H100"}),
    ]
    bodies = [
        make.hello("a0"),
        *batch.messages(),
        *map(EventMessage, events),
        make.telemetry({("", "steal"): [0.0, 4.0, 8.0], ("GPU-0", "temperature"): [50.0, 60.0, 70.0]}),
        make.began(1, "compute"),
        make.stage(1, "compute"),
        EventMessage(make.RankInventoryEvent(place, "GPU-0", {"torch": "2"})),
        make.raised(1),
        *make.finished(0),
        make.ended(1, 1),
        make.NodeBye("failed"),
    ]
    return [encode(AgentMessage(n, body, n - 1)) for n, body in enumerate(bodies, 1)]


def report_of(wires: list[bytes]) -> str:
    protocol, folded, kept = RunProtocol("run", "job"), FactFold(), []
    lines = StageLines(folded)
    for wire in wires:
        try:
            message = decode_agent(wire)
        except WireError:
            continue
        for action in protocol.on_message("a0", message, 0.0):
            if isinstance(action, StoreMessage):
                lines.on_message(message.body)
                folded.add("a0", message.n, message.body)
                kept.append(("a0", message.n, message.body))
    protocol.tick(1000.0)
    lines.due()
    lines.end()
    report = build_report(fold(kept), run_id="x", started=None, ended=None)
    assert len(to_json(report)) < 1 << 20
    return render_text(report)


def test_the_undamaged_job_is_told(wires):
    assert "VERDICT  overflow" in report_of(wires)


BYTES = st.one_of(
    st.binary(min_size=1, max_size=9),
    st.sampled_from(
        [b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xcb\x7f\xf8" + b"\0" * 6, b"\xc0", b"\xff", b"\x7f"]
    ),
)


@pytest.mark.slow
@given(st.data())
def test_any_damage_to_any_message(wires, data):
    damaged = list(wires)
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, len(wires) - 1))
        at = data.draw(st.integers(0, len(damaged[number]) - 1))
        new = data.draw(BYTES)
        cut = data.draw(st.booleans())
        # in place of as many bytes, or of one: a number grows
        damaged[number] = damaged[number][:at] + new + damaged[number][at + (len(new) if cut else 1) :]
    report_of(damaged)
