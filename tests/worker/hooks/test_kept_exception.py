"""torch silences what a forward hook raises after the forward has raised: a handler's exception is raised later."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import nn


class Told(Exception):
    """What a handler raises."""


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the script")


@pytest.fixture
def tells(monkeypatch):
    """A signal comes whenever the frame of a call that raised is written."""

    def handler(number: int, frame: Any) -> None:
        raise Told

    before = signal.signal(signal.SIGUSR1, handler)
    yield lambda watched: monkeypatch.setattr(
        watched.hooks._calls, "_leave", lambda *_: signal.raise_signal(signal.SIGUSR1)
    )
    signal.signal(signal.SIGUSR1, before)


def test_it_is_raised_by_the_next_hook(watch, tells, monkeypatch):
    watched = watch()
    model = nn.Sequential(Fails())
    tells(watched)
    with pytest.raises(ValueError, match="of the script"):
        model(torch.ones(2))
    monkeypatch.undo()
    with pytest.raises(Told):
        nn.Identity()(torch.ones(2))
    nn.Identity()(torch.ones(2))
    assert watched.faults == []


def test_an_optimizers_step_raises_it_too(watch, tells, monkeypatch):
    watched = watch()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    tells(watched)
    with pytest.raises(ValueError, match="of the script"):
        Fails()(torch.ones(2))
    monkeypatch.undo()
    with pytest.raises(Told):
        optimizer.step()
    optimizer.step()
