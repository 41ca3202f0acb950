"""A slow rank in a report: its host and its GPU stand beside it, found by the UUID that its rank has told."""

from __future__ import annotations

import pytest
from gpuwatch.collector.assemble.build import build_report
from gpuwatch.collector.assemble.stragglers import step_report
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.report.text_report import render_text
from gpuwatch.core.events.agent_events import StepTimes
from gpuwatch.core.events.preflight_events import RankInventoryEvent
from gpuwatch.core.preflight import InventoryFacts
from gpuwatch.core.recorder.layout import TimedStep
from gpuwatch.core.wire.columns import pack_steps
from gpuwatch.core.wire.messages import EventMessage

MS = 1_000_000


def rank_of(make, rank, *, forward_ms, waiting_ms):
    """40 steps, and the inventory of a rank on the GPU of its number."""
    parts = [10 * MS, forward_ms * MS, 30 * MS, waiting_ms * MS, 10 * MS]
    steps = [TimedStep(number, tuple(parts)) for number in range(1, 41)]
    times = StepTimes(make.where(rank), 40, [40 * part / 1e9 for part in parts], pack_steps(steps))
    facts = InventoryFacts(host=f"h{rank}", uuid=f"GPU-{rank}", local_rank=0)
    return [EventMessage(times), EventMessage(RankInventoryEvent(make.where(rank), "cuda:0", {}, facts))]


def figures(make, rank, clock, hot):
    names = {(f"GPU-{rank}", "sm_clock"): clock, (f"GPU-{rank}", "temperature"): hot}
    return make.telemetry(
        {("", "cpu"): [2.5 * n for n in range(20)], **{name: [of] * 20 for name, of in names.items()}}
    )


@pytest.mark.parametrize("with_figures", [True, False])
def test_clocks_and_heat_stand_beside_it(make, with_figures):
    messages = []
    for rank in range(4):
        slow = rank == 2
        bodies = [make.hello(f"a{rank}", f"h{rank}", nproc=1, nodes=4)]
        bodies += rank_of(make, rank, forward_ms=130 if slow else 50, waiting_ms=0 if slow else 80)
        if with_figures:
            bodies.append(figures(make, rank, 1410.0 if slow else 1980.0, 88.0 if slow else 61.0))
        messages += [(f"a{rank}", n, body) for n, body in enumerate(bodies, 1)]
    report = build_report(fold(messages), run_id="x", started=None, ended=None)
    (slow_rank,) = report.steps.stragglers
    expected = [
        "its host h2 over the run: 50% of its processors in use (the others: 50%)",
        "its GPU GPU-2 over the run: SM clock 1410 MHz on average (the others: 1980 MHz), up to 88 C (the others: 61 "
        "C)",
    ]
    assert slow_rank.rank == 2
    assert (slow_rank.beside[:2] == expected) == with_figures
    said = " ".join(render_text(report).split())
    assert (expected[1] in said) == with_figures


@pytest.mark.parametrize(("verdicts_rank", "slow"), [(None, [2]), (2, [2]), (1, [])])
def test_beside_a_verdict_on_another_rank_no_rank_is_called_slow(make, verdicts_rank, slow):
    messages = []
    for rank in range(4):
        bodies = [make.hello(f"a{rank}", f"h{rank}", nproc=1, nodes=4)]
        bodies += rank_of(make, rank, forward_ms=130 if rank == 2 else 50, waiting_ms=0 if rank == 2 else 80)
        messages += [(f"a{rank}", n, body) for n, body in enumerate(bodies, 1)]

    report = step_report(fold(messages), 0, verdicts_rank)

    assert [each.rank for each in report.stragglers] == slow
    assert report.compared == 37
