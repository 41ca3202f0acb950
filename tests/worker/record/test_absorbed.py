"""Nan that softmax makes of rows that are masked whole, as CpmAnt does: on the host, on a late device, compiled."""

from __future__ import annotations

import pytest
import torch
from gpuwatch.core.events.alarms import AbsorbedValue
from torch import nn

PATHS = ("native", "python", "late", "compiled")
fewer_quick = pytest.mark.parametrize(
    "path", ["native", "late", pytest.param("compiled", marks=pytest.mark.slow)], indirect=True
)


class Attention(nn.Module):
    """The pattern of transformers' CpmAntAttention: scores, a mask of -inf, softmax as a module, the mask again."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(0.0)
        self.out = nn.Linear(8, 8)
        self.keeps = keeps

    def forward(self, hidden, open_):
        query = self.project(hidden)
        score = query @ query.transpose(-1, -2)
        score = torch.masked_fill(score, ~open_, float("-inf"))
        score = self.dropout(self.softmax(score))
        if not self.keeps:
            score = torch.masked_fill(score, ~open_, 0)
        return self.out(score @ query)


class Net(nn.Module):
    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Attention(keeps) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, hidden, open_):
        hidden = self.enter(hidden)
        for layer in self.layers:
            hidden = hidden + layer(hidden, open_)
        return self.head(hidden)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr("gpuwatch.worker.hooks.native_writer.NativeFrameWriter", None)
    if request.param == "late":
        request.getfixturevalue("late")
    return request.param


def _train(watch, path, *, keeps=False, fault=None, **settings):
    torch.manual_seed(0)
    watched = watch(**settings)
    net = Net(keeps)
    model = torch.compile(net, backend="aot_eager", fullgraph=True) if path == "compiled" else net
    open_ = torch.ones(2, 4, 4, dtype=torch.bool)
    open_[1, 0] = False  # left padding: no position is open to the first row
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for batch in range(3):
        if batch == 2 and fault is not None:
            fault(net)
        optimizer.zero_grad()
        model(torch.randn(2, 4, 8), open_).sum().backward()
        optimizer.step()
    watched.settle()
    assert watched.faults == []
    return watched


@fewer_quick
def test_nan_that_is_taken_away_is_counted_and_no_alarm(watch, path):
    watched = _train(watch, path, on_overflow="abort")

    assert watched.anomalies == []
    absorbed = watched.of(AbsorbedValue)
    assert [(each.module, each.role, each.value, each.by) for each in absorbed] == [
        (f"layers.{number}.softmax", "output", "nan", f"layers.{number}") for number in (0, 1)
    ]
    assert {each.where.batch for each in absorbed} == {0}
    assert watched.reader.state().absorbed == 6


@fewer_quick
def test_nan_that_is_kept_is_an_alarm_where_it_was_made(watch, path):
    watched = _train(watch, path, keeps=True)

    first = watched.anomalies[0]
    assert (first.where.batch, first.module, first.phase, first.role) == (0, "layers.0.softmax", "forward", "output")
    assert (first.inputs_finite, first.weights_finite) == (False, True)
    assert watched.of(AbsorbedValue) == []


@fewer_quick
def test_a_fault_behind_an_absorbed_nan_is_an_alarm(watch, path):
    def break_head(net):
        with torch.no_grad():
            net.head.weight.fill_(3e38)

    watched = _train(watch, path, fault=break_head)

    first = watched.anomalies[0]
    assert (first.where.batch, first.module, first.phase) == (2, "head", "forward")
    assert len(watched.of(AbsorbedValue)) == 2
