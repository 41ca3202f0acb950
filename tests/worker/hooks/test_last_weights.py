"""Weights that change after the last forward, by no step that calls a hook."""

from __future__ import annotations

import gpuwatch
import pytest
import torch
from torch import nn


def train(model, step, batches=3):
    for batch in range(batches):
        model(torch.ones(2, 4)).square().sum().backward()
        step(float("inf") if batch == batches - 1 else 1e-3)
        model.zero_grad()


def by_hand(model):
    def step(rate):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad

    return step


def compiled(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = torch.compile(optimizer.step, backend="eager")

    def step(rate):
        optimizer.param_groups[0]["lr"] = rate
        graph()

    return step


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("update", [by_hand, pytest.param(compiled, marks=pytest.mark.slow)])
def test_they_are_read_at_the_end_and_the_run_is_not_clean(update):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with gpuwatch.watch(model, on_overflow="continue") as watched:
        train(model, update(model))
        verdict = watched.verdict()
    assert (verdict.kind, verdict.batch, verdict.certainty) == ("overflow", 2, "supported")
    assert verdict.role == "weight"


def test_finite_ones_leave_no_frame(watch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    watched = watch(on_overflow="continue")
    step = by_hand(model)
    train(model, lambda rate: step(1e-3))
    watched.hooks.read_the_rest()
    phases = [frame.phase for page in watched.pages for frame in page.frames]
    assert "optimizer" not in phases
    assert watched.anomalies == watched.faults == []


def test_those_that_a_step_has_read_are_not_read_again(watch, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    watched = watch(on_overflow="continue")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train(model, lambda rate: optimizer.step())
    monkeypatch.setattr(watched.hooks.rows, "weight_again", lambda *given: pytest.fail("it was read"))
    watched.hooks.read_the_rest()
    assert watched.faults == []
