"""Results of functional collectives that are not there yet: nobody waits for them before the script does."""

from __future__ import annotations

import math

import pytest
import torch
from gpuwatch.core.events.own_limits import UnmeasuredTensor
from gpuwatch.worker.detect_overflow import measure_with_one_wait
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

X = torch.ones(2, 4)
pytestmark = pytest.mark.usefixtures("alone_in_a_group")


class Reduces(nn.Module):
    """Returns what an all_reduce has not filled yet."""

    def forward(self, x):
        return functional.all_reduce(x * 1.0, "sum", dist.group.WORLD)


class Net(nn.Module):
    def __init__(self, uses=True):
        super().__init__()
        self.reduces, self.head, self.uses = Reduces(), nn.Linear(4, 2), uses

    def forward(self, x):
        reduced = self.reduces(x)
        self.was_waited_for = reduced.completed
        return self.head(reduced) if self.uses else reduced


def kinds(page):
    return {(frame.module, row.role): row.kind for frame in page.frames for row in frame.rows}


@pytest.mark.usefixtures("way")
def test_the_script_waits_itself_and_the_value_is_read_where_it_is_used(watch):
    watched = watch()
    model = Net()
    for _ in range(2):
        with torch.no_grad():
            model(X)
        assert not model.was_waited_for
    found = kinds(watched.last)
    assert found["reduces", "output"] == "not_measurable"
    assert found["head", "input[0]"] == "measured"
    watched.hooks.read_the_rest()
    assert watched.of(UnmeasuredTensor) == watched.anomalies == watched.faults == []


def test_a_bad_one_that_is_used_is_an_anomaly(watch):
    watched = watch()
    with torch.no_grad():
        Net()(X * math.inf)
    assert watched.anomalies
    assert watched.faults == []


def test_one_that_nobody_has_waited_for_by_the_next_batch_counts_as_not_measured(watch):
    watched = watch()
    model = Net(uses=False)
    kept = [model(X)]
    assert not kept[0].completed
    kept.append(model(X))
    assert not kept[0].completed
    (told,) = watched.of(UnmeasuredTensor)
    assert (told.module, told.cls, told.role, told.dtype) == ("reduces", "Reduces", "output", "float32")
    assert watched.faults == []


@pytest.mark.parametrize(("factor", "told"), [(1.0, 0), (math.inf, 1)])
def test_one_that_the_script_alone_uses(watch, factor, told):
    watched = watch()
    kept = Net(uses=False)(X * factor)
    kept.trigger_wait()
    watched.hooks.read_the_rest()
    assert len(watched.of(UnmeasuredTensor)) == told
    assert watched.faults == []


def test_who_asks_for_the_numbers_of_one_gets_them():
    assert measure_with_one_wait(Reduces()(X * 3)).high == measure_with_one_wait(X * 3).high
