"""Whose own code lies behind a bad value of a forward, where it goes on by another way than frames show."""

from __future__ import annotations

import math

import gpuwatch
import pytest
import torch
from gpuwatch.core.events.looked_again import HeldValue, OwnCodeModule
from gpuwatch.tests.fakes.late_device import LateDevice
from torch import nn

from ..conftest import use_late_device


class Encoder(nn.Module):
    """Returns what its child returned, and leaves another tensor where nobody sees it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.factor = 1.0
        self.leave = None

    def forward(self, x):
        y = self.fc(x)
        self.leave(y * self.factor)
        return y


class Taker(nn.Module):
    def __init__(self):
        super().__init__()
        self.take = None
        self.factor = 1.0

    def forward(self, x):
        return (x + self.take()) * self.factor


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.encoder, self.taker, self.head = Encoder(), Taker(), nn.Linear(4, 4)
        kept: list[torch.Tensor] = []
        if way == "an attribute":
            self.encoder.leave = lambda tensor: setattr(self.encoder, "kept", tensor)
            self.taker.take = lambda: self.encoder.kept
        else:
            self.encoder.leave, self.taker.take = kept.append, kept.pop

    def forward(self, x):
        return self.head(self.taker(self.encoder(x)))


@pytest.fixture(params=["host", "late"])
def path(request, monkeypatch):
    if request.param == "late":
        use_late_device(monkeypatch, LateDevice(3, longest=6))
    return request.param


def train(model, faulty, *, grad=True):
    for step in range(4):  # a device is asked in the last one what the one before has given
        faulty.factor = math.nan if step >= 2 else 1.0
        with torch.set_grad_enabled(grad):
            loss = model(torch.ones(2, 4)).sum()
        if grad:
            loss.backward()


def first_again(watched):
    watched.settle()
    assert watched.faults == []
    return watched.anomalies[0].again


@pytest.mark.parametrize("way", ["an attribute", "a list"])
def test_the_graph_shows_a_module_that_no_frame_shows(watch, path, way):
    watched = watch()
    model = Net(way)
    train(model, model.encoder)
    again = first_again(watched)
    assert watched.anomalies[0].module == "taker"
    assert again.own_code == [
        OwnCodeModule("encoder", "Encoder", "MulBackward0"),
        OwnCodeModule("taker", "Taker", "AddBackward0"),
    ]
    assert again.own_code_of == "output"
    held = [HeldValue("encoder", "Encoder", "kept", "nan")] if way == "an attribute" else []
    assert again.held == held


def test_who_takes_it_out_may_have_made_it_itself(watch, path):
    """The graph has no numbers: it tells who comes into question."""
    watched = watch()
    model = Net("a list")
    train(model, model.taker)
    assert [each.module for each in first_again(watched).own_code] == ["encoder", "taker"]


@pytest.mark.parametrize("place", ["embed.dropout", "blocks.1"])
def test_residual_sums_and_children_are_shown(watch, path, place):
    """What a child returned is in its frame, also where a call around it hands it on unchanged."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out, self.factor = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4), 1.0

        def forward(self, x, mask):
            return x + self.out(self.inner(x) * mask) * self.factor

    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.dropout = nn.Parameter(torch.ones(4)), nn.Dropout(0.0)

        def forward(self, x):
            return self.dropout(x * self.weight)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.embed = Embed()

        def forward(self, x):
            mask = torch.ones(2, 4)
            x = self.embed(x)
            for block in self.blocks:
                x = block(x, mask=mask)
            return x

    watched = watch()
    model = Two()
    if place == "embed.dropout":  # the next to take what it hands on
        model.blocks[0].inner[0].forward = lambda x, fc=model.blocks[0].inner[0]: fc.weight.sum() * x * faulty.factor
        place, faulty = "blocks.0.inner.0", model.embed
    else:
        faulty = model.blocks[1]
    train(model, faulty)
    assert [each.module for each in first_again(watched).own_code] == [place]


@pytest.mark.parametrize(("way", "module"), [("an attribute", "encoder"), ("a list", "")])
def test_the_verdict_names_the_module_that_made_it_or_both(path, way, module):
    model = Net(way)
    handle = gpuwatch.watch(model, on_overflow="continue")
    try:
        train(model, model.encoder)
        verdict = handle.verdict()
    finally:
        handle.remove()
    assert (verdict.module, verdict.phase, verdict.certainty) == (module, "forward", "supported")
    assert "made by code of `encoder` " in verdict.statement
    assert ("`taker`" in verdict.statement.partition("made by code of")[2]) == (way == "a list")
    assert any("it depends on MulBackward0 of `encoder` (Encoder)" in line for line in verdict.evidence)


def test_a_bound_or_a_start_that_is_inf_is_no_value_that_goes_on(watch, path):
    watched = watch()
    model = Net("a list")
    model.head.best, model.head.bound = torch.tensor(math.inf), torch.full((4,), -math.inf)
    train(model, model.encoder)
    assert first_again(watched).held == []


def test_without_a_graph_a_bad_attribute_is_told(path):
    model = Net("an attribute")
    handle = gpuwatch.watch(model, on_overflow="continue")
    try:
        train(model, model.encoder, grad=False)
        verdict = handle.verdict()
    finally:
        handle.remove()
    assert (verdict.module, verdict.certainty) == ("taker", "supported")
    assert "attribute kept of `encoder` (Encoder) holds nan" in verdict.evidence
