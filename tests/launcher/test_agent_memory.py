"""How much memory a node agent takes for itself while its collector stands still: a real process, counted in bytes."""

from __future__ import annotations

import signal

import psutil
import pytest
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.run_position import RunPosition
from gpuwatch.core.recorder.layout import FRAMES_PER_SEGMENT
from gpuwatch.core.values import ValueEncoding
from gpuwatch.core.wire.messages import EventMessage, PageMessage
from gpuwatch.launcher.agent.outbox import PAGE_BYTES

from ..waiting import until
from .conftest import Rank
from .test_delivery import kill, report_of, stored

MOST_BYTES = 60e6
NAMES_BYTES = 12e6
"""What the names of 8 ranks with 1,000 modules each would take; the ranks here have one module."""
RANKS = 8
BATCHES = 60
FRAMES = 6 * FRAMES_PER_SEGMENT
"""Of a batch: a page of 80 kB."""


def wide_batch(rank: Rank, number: int) -> None:
    """A batch with an overflow, as each one has with `--on-overflow continue`."""
    writer = rank.writer
    page = writer.begin_page(0, number, number)
    for _ in range(FRAMES):
        value = writer.value(0, 0x3F800000, ValueEncoding.FLOAT32 << 8)
        writer.frame(0, 0xFFFFFFFF, 0, 0, number, [(0, value, 0xFFFFFFFF, 1, 0, 0)] * 3)
    where = RunPosition(rank.rank, 0, number, number, "Net", number, number)
    writer.append(Anomaly(where, 0, "fc", "Linear", "forward", "output", "+inf", "float32"))
    writer.end_page(page)


@pytest.mark.slow
@pytest.mark.sample(1)
def test_an_agent_stays_below_60_mb_while_its_collector_stands_still(make_node):
    """Its own memory (USS): what it shares with each other Python process of the node is not in it."""
    node = make_node()
    node.start_agent(node.start_collector(), ranks=range(RANKS), world=RANKS)
    wide_batch(node.ranks[0], 0)
    until(lambda: stored(node, PageMessage), "the first page")
    (spool,) = node.scratch.glob("*.spool")
    agent, most, begins = psutil.Process(node.agent.pid), 0, spool.stat().st_size
    kill(node.collector, signal.SIGSTOP)
    try:
        for number in range(1, BATCHES + 1):
            for rank in node.ranks:
                wide_batch(rank, number)
            written = begins + number * RANKS * FRAMES * 80
            until(lambda written=written: spool.stat().st_size > written, "what the agent has read")
            most = max(most, agent.memory_full_info().uss)
    finally:
        kill(node.collector, signal.SIGCONT)
    assert spool.stat().st_size - begins > 2 * PAGE_BYTES
    assert most < MOST_BYTES - NAMES_BYTES
    node.end_ranks()
    verdict = node.verdict()
    assert (verdict.exit_code, verdict.kind) == (4, "overflow"), verdict.text
    assert sum(isinstance(body.event, Anomaly) for body in stored(node, EventMessage)) == 1 + RANKS * BATCHES
    pages = [body for body in stored(node, PageMessage) if body.batch == 1]
    assert {body.rank for body in pages} == set(range(RANKS)), "what the verdict is about was dropped last"
    lost = sum(rank["lost"]["pages"] for rank in report_of(node)["ranks"])
    assert lost > 0
