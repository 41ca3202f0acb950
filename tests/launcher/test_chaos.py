"""Helpers that are killed, stopped and resumed at random, while four ranks on two nodes train.

The ranks are recorders that real writers write: what happens to a rank does not depend on torch here.
"""

from __future__ import annotations

import json
import random
import signal
import time

import psutil
import pytest
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.wire.pipe import LaunchDone, WorkersEnded

DISTURBED_S = 12.0
KINDS = ("clean", "overflow", "killed")


def disturb(rng, nodes) -> None:
    """One helper is killed, or stopped for a while."""
    node = rng.choice(nodes)
    helper = node.collector if node.collector is not None and rng.random() < 0.5 else node.agent
    try:
        process = psutil.Process(helper.pid)
        if rng.random() < 0.5:
            process.send_signal(signal.SIGKILL)
        else:
            process.send_signal(signal.SIGSTOP)
            time.sleep(rng.random() * 2)
            process.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.sample(1, of=f"helpers at random: {KINDS[n % 3]}")) for n in range(6)]
)
def test_whatever_happens_to_the_helpers_the_verdict_is_right(make_node, seed):
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    head, other = nodes = [make_node(), make_node()]
    address = head.start_collector()
    for number, node in enumerate(nodes):
        node.start_agent(address, ranks=range(2 * number, 2 * number + 2), world=4, nodes=2)
    ends = time.monotonic() + DISTURBED_S
    batch = 0
    while time.monotonic() < ends:
        for node in nodes:
            node.train(batch)
        if kind == "overflow" and batch == 20:
            where = RunPosition(3, 0, batch, batch, "Net", batch, batch)
            other.ranks[1].writer.append(Anomaly(where, 0, "fc", "Linear", "forward", "output", "+inf", "float32"))
        batch += 1
        time.sleep(0.05)
        if rng.random() < 0.06:
            disturb(rng, nodes)
    if kind == "killed":
        other.agent.send(WorkersEnded(0, {2: -signal.SIGTERM, 3: -signal.SIGKILL}, [3]))
        head.agent.send(WorkersEnded(0, {0: -signal.SIGTERM, 1: -signal.SIGTERM}, []))
        for node in nodes:
            node.agent.send(LaunchDone("failed"))
    else:
        for node in nodes:
            node.end_ranks()
    verdicts = [node.verdict() for node in nodes]
    codes = {"clean": 0, "overflow": 4, "killed": 5}
    assert [verdict.exit_code for verdict in verdicts] == [codes[kind]] * 2, (verdicts[0].text, head.said, other.said)
    report = json.loads((head.run_dir / "report.json").read_text())
    if kind != "clean":
        assert report["verdict"]["rank"] == 3
    told = [(entry["rank"], entry["what"]) for entry in report["timeline"]]
    assert len(told) == len(set(told)), told
    assert [rank["batch"] for rank in report["ranks"]] == [batch - 1] * 4
    if kind != "killed":
        assert head.stops == other.stops == []
