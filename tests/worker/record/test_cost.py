"""`--measure-cost`: every second batch is left out, and the two kinds are compared."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.core.events import RunPosition, WatchCost
from gpuwatch.worker.record import progress as cost_module
from gpuwatch.worker.record.progress import CostMeter
from torch import nn

X = torch.ones(3, 4)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told to move."""

    class Clock:
        now = 0

        def perf_counter_ns(self) -> int:
            return self.now

    clock = Clock()
    monkeypatch.setattr(cost_module, "time", clock)
    return clock


def test_medians_of_both_kinds_without_the_warm_up(clock):
    meter = CostMeter()
    times = [9000, 9000, 9000, 9000, 10, 30, 12, 34, 11, 32, 0]
    for number, duration in enumerate(times):
        meter.batch_begins(number % 2 == 1)
        clock.now += duration
    found = meter.result(RunPosition(rank=0))
    assert (found.plain_ns, found.watched_ns) == (32, 11)
    assert (found.plain_batches, found.watched_batches) == (3, 3)


@pytest.mark.parametrize("batches", [0, 1, 5])
def test_without_both_kinds_there_is_no_result(batches):
    meter = CostMeter()
    for number in range(batches):
        meter.batch_begins(number % 2 == 1)
    assert meter.result(RunPosition(rank=0)) is None


def test_every_second_batch_of_the_run_is_left_out(watch, measured):
    watched = watch(measure_cost=True)
    model, loss = nn.Linear(4, 2), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looked = []
    for _ in range(20):
        loss(model(X), torch.zeros(3, 2)).backward()
        optimizer.step()
        looked.append(len(measured))
        measured.clear()
    assert watched.of(WatchCost) == []
    assert [page.batch for page in watched.pages if page.root == "Linear"] == list(range(0, 20, 2))
    assert set(looked[1::2]) == {0}, "a plain batch costs nothing"
    assert min(looked[::2]) > 5
    watched.hooks.settle()
    watched.hooks.settle()
    (found,) = watched.of(WatchCost)
    assert (found.plain_batches, found.watched_batches) == (7, 8)
    assert found.plain_ns > 0
    assert found.watched_ns > 0
