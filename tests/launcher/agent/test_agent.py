"""The whole way: a real agent reads a real process from /proc, and what it sends makes the figures of the report."""

from __future__ import annotations

import io
import subprocess
import sys
import time

import msgspec
import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.core.codes import VerdictKind
from gpuwatch.core.events.agent_events import WorkerExit
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.messages import (
    VERDICT_PATIENCE_S,
    AgentHello,
    EventMessage,
    NodeBye,
    TelemetryMessage,
    decode_agent,
)
from gpuwatch.core.wire.pipe import AgentConfig, JobResult, LaunchDone, WorkersEnded, WorkersStarted
from gpuwatch.launcher.agent.agent import NEVER_CAME_S, NodeAgentLoop

from ...known_keys import KEYS

WAIT_S = 300.0
MIB = 1 << 20
GROWS = """
import sys
data = []
for line in sys.stdin:
    data.append(b"x" * int(line))
    print("done", flush=True)
"""


class Process:
    """A process that takes memory when it is told to."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._child.pid

    def take(self, num_bytes: int) -> None:
        self._child.stdin.write(f"{num_bytes}\n")
        self._child.stdin.flush()
        assert self._child.stdout.readline() == "done\n"

    def end(self) -> None:
        self._child.communicate()


@pytest.fixture
def process():
    made = Process()
    yield made
    made.end()


@pytest.fixture
def agent(tmp_path):
    config = AgentConfig(
        collector="tcp://127.0.0.1:1",
        server_key=KEYS.collector.public.decode(),
        public_key=KEYS.agent.public.decode(),
        private_key=KEYS.agent.private.decode(),
        recorder_dir=str(tmp_path),
        spool_dir=str(tmp_path),
        hello=AgentHello("", "", 1, 1, 1, ["gpuwatch", "launch", "train.py"], {}, "job"),
        identity="node",
        telemetry_s=5.0,
    )
    made = NodeAgentLoop(config, io.BytesIO())
    yield made
    made.close()


def anomaly():
    return EventMessage(
        Anomaly(
            RunPosition(1, batch=3, time_ns=time.time_ns()), 2, "fc", "Linear", "forward", "output", "+inf", "float32"
        )
    )


def sampled(agent, now):
    """One sample, begun at this time."""
    end = time.monotonic() + WAIT_S
    agent.turn(now)
    while agent._telemetry._waits:
        assert time.monotonic() < end
        agent.turn(now)
        time.sleep(0.001)


def sent(agent):
    return [(agent._id, n, decode_agent(data).body) for n, data in enumerate(agent.outbox.unacknowledged(), 1)]


@pytest.mark.slow
def test_what_a_rank_takes_is_in_the_report(agent, process):
    now = time.monotonic()
    agent.hear_launch(msgspec.json.encode(WorkersStarted(0, {1: process.pid})), now)
    process.take(0)
    sampled(agent, now)
    process.take(200 * MIB)
    sampled(agent, now + 5)
    agent._put(anomaly())
    agent.hear_launch(msgspec.json.encode(WorkersEnded(0, {1: 1}, [1])), now)
    agent.hear_launch(msgspec.json.encode(LaunchDone("failed")), now)
    agent.turn(now + 6)

    messages = sent(agent)
    of_telemetry = [isinstance(body, TelemetryMessage) for _, _, body in messages]
    assert sum(of_telemetry) == 2, "at the anomaly, and at the end"
    assert isinstance(messages[-1][2], NodeBye)
    report = build_report(fold(messages), run_id="x", started=None, ended=None)
    assert report.telemetry is not None
    assert report.telemetry.trouble == ""
    (node,) = report.telemetry.nodes
    by_name = {(figure.of, figure.what): figure.values for figure in node.figures}
    first, last = by_name["rank 1", "rss"]
    assert 200 * MIB <= last - first + MIB < 220 * MIB, "four digits are shown"
    assert by_name["", "memory_used"][0] <= by_name["", "memory_total"][0]
    assert {("runs-dir", "disk_free"), ("scratch", "disk_free"), ("rank 1", "open_files")} <= set(by_name)
    assert node.troubles == []


@pytest.mark.slow
def test_an_agent_that_goes_on_for_another_sends_what_that_one_had(agent, process, tmp_path):
    now = time.monotonic()
    agent.hear_launch(msgspec.json.encode(WorkersStarted(0, {1: process.pid})), now)
    sampled(agent, now)
    agent._put(anomaly())
    first = [body for _, _, body in sent(agent) if isinstance(body, TelemetryMessage)]
    second = NodeAgentLoop(msgspec.structs.replace(agent._config, life=1), io.BytesIO())
    try:
        assert [body for _, _, body in sent(second) if isinstance(body, TelemetryMessage)] == first
    finally:
        second.close()


@pytest.mark.parametrize(("run", "patience_s"), [("", NEVER_CAME_S), ("20261127-0102-abcd", VERDICT_PATIENCE_S)])
def test_an_agent_waits_for_a_collector_as_long_as_the_one_before_it(agent, run, patience_s):
    """`run`: the agent that it follows was taken into this one."""
    config = msgspec.structs.replace(agent._config, life=1, hello=msgspec.structs.replace(agent._config.hello, run=run))
    second = NodeAgentLoop(config, io.BytesIO())
    try:
        now = time.monotonic()
        second.hear_launch(msgspec.json.encode(LaunchDone("failed")), now)
        assert not second.finished(now + patience_s - 0.1)
        assert second.finished(now + patience_s + 0.1)
    finally:
        second.close()


def test_its_launch_has_the_verdict_before_the_collector_may_end(agent, monkeypatch):
    """An agent that is killed between the two leaves a launch that can ask nobody."""
    order = []
    monkeypatch.setattr(agent, "_tell", order.append)
    monkeypatch.setattr(agent._link, "leave", lambda: order.append("left"))
    final = JobResult(5, VerdictKind.LOST, "", "")
    agent.hear_launch(msgspec.json.encode(LaunchDone("failed")), time.monotonic())
    agent._hear_collector(final, time.monotonic())
    agent._conclude()
    assert order == [final, "left"]


def test_a_verdict_that_comes_before_its_ranks_have_ended_is_told_then(agent, monkeypatch):
    """The collector did not wait for this node. It is not to wait for it now either."""
    order = []
    monkeypatch.setattr(agent, "_tell", order.append)
    monkeypatch.setattr(agent._link, "leave", lambda: order.append("left"))
    final = JobResult(5, VerdictKind.LOST, "", "")
    agent._hear_collector(final, time.monotonic())
    assert order == ["left"]
    agent.hear_launch(msgspec.json.encode(LaunchDone("failed")), time.monotonic())
    agent._conclude()
    assert order == ["left", final]


@pytest.mark.parametrize(("is_over", "by"), [(False, "running"), (True, "unknown")])
def test_of_a_rank_whose_launch_was_killed_no_end_is_told_that_nobody_saw(agent, process, is_over, by):
    """Whether its process has ended is known, and no more."""
    now = time.monotonic()
    agent.hear_launch(msgspec.json.encode(WorkersStarted(0, {1: process.pid})), now)
    if is_over:
        process.end()
    agent._launch_closed(now)

    (exit_,) = (
        body.event
        for _, _, body in sent(agent)
        if isinstance(body, EventMessage) and isinstance(body.event, WorkerExit)
    )
    assert (exit_.where.rank, exit_.code, exit_.by) == (1, None, by)
    assert bool(exit_.ended_ns) == is_over
