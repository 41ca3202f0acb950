"""Numbers that were read on a device leave before a collective is issued: it may never end, and holds up its stream."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpuwatch.tests.fakes.late_device import LateDevice
from gpuwatch.worker.hooks import process_groups
from torch import nn

from ..conftest import use_late_device


@pytest.fixture
def driver(monkeypatch):
    driver = LateDevice()
    use_late_device(monkeypatch, driver)
    return driver


@pytest.fixture(params=["native", "python"])
def writer(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(process_groups, "GroupWriter", None)


class Communicates(nn.Module):
    """Issues collectives between two layers. `copies`: how many copies had been started before and after each."""

    def __init__(self, driver, *collectives):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.driver, self.collectives, self.copies = driver, collectives, []

    def forward(self, x):
        y = self.first(x)
        for collective in self.collectives:
            before = self.driver.copies
            collective()
            self.copies.append(self.driver.copies - before)
        return self.second(y)


@pytest.mark.parametrize("watched_things", [("forward", "grads", "comms"), ("forward",)])
def test_what_was_read_is_sent_before_the_collective(watch, driver, writer, group, watched_things):
    watched = watch(watch=list(watched_things))
    model = Communicates(driver, dist.barrier, dist.barrier)  # nothing is read at a barrier
    model(torch.ones(2, 3))
    assert model.copies[0] >= 1, "sent before the collective"
    assert model.copies[1] == 0, "there was nothing to send"
    assert watched.faults == []


def test_reductions_one_after_another_are_not_sent_one_by_one(watch, driver, writer, group):
    watched = watch()
    tensors = [torch.ones(4) for _ in range(8)]
    model = Communicates(driver, *([lambda: [dist.all_reduce(tensor) for tensor in tensors]] * 2))
    model(torch.ones(2, 3))
    assert model.copies[1] == 0
    assert watched.faults == []
