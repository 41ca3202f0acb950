"""A call that hands on an input which is bad already is not blamed, however its numbers are read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn


class HandsOn(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, *args, **kwargs):
        return self.how(*args, **kwargs)


class Net(nn.Module):
    """`bad` is what the script has made of a finite tensor, or has not written into yet."""

    def __init__(self, how):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.hands_on = HandsOn(how)

    def forward(self, x, bad):
        self.hands_on(bad)
        return self.fc(x)


def in_part(bad):
    bad[:2] = 1.0
    return bad


HOW = {
    "the tensor": lambda bad: bad,
    "in a tuple": lambda bad: (torch.zeros(2), bad),
    "by a name": lambda bad: {"logits": bad},
    "a view of all of it": lambda bad: bad.view(2, 8),
    "written into": lambda bad: bad.mul_(2),
    "written into in part": in_part,
    "written into, finite now": lambda bad: bad.zero_(),
}


@pytest.fixture(params=["native", "python", "late", "late, by python"])
def reader(request, monkeypatch):
    if "python" in request.param:
        monkeypatch.setattr("gpuwatch.worker.hooks.native_writer.NativeFrameWriter", None)
    if "late" in request.param:
        request.getfixturevalue("late")


def settled(watched):
    watched.settle()
    assert watched.faults == []
    return watched


@pytest.mark.quick(28)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_who_hands_on_a_bad_input_is_not_blamed(watch, reader, how, value):
    watched = watch(on_overflow="continue", watch=("forward", "weights"))
    model = Net(how)
    for _ in range(2):
        model(torch.ones(2, 4), torch.full((4, 4), value))
    assert settled(watched).anomalies == []
    assert {row.flags > 0 for page in watched.pages for row in page.frames[0].inputs} == {
        how is not HOW["written into, finite now"]
    }


def test_who_has_made_it_is_blamed_and_who_hands_it_on_is_not(watch, reader):
    watched = watch(on_overflow="continue", watch=("forward", "weights"))
    model = nn.Sequential(
        nn.Linear(4, 4), HandsOn(lambda x: x.abs() / 0), *map(HandsOn, (HOW["the tensor"], HOW["a view of all of it"]))
    )
    model(torch.ones(4, 4))
    assert [(found.module, found.role, found.inputs_finite) for found in settled(watched).anomalies] == [
        ("1", "output", True)
    ]


def test_who_writes_into_a_finite_input_is_blamed(watch, reader):
    watched = watch(on_overflow="continue", watch=("forward", "weights"))
    model = nn.Sequential(nn.Linear(4, 4), HandsOn(lambda x: x.abs_().mul_(math.inf)), HandsOn(HOW["the tensor"]))
    with torch.no_grad():
        model(torch.ones(4, 4))
    assert [found.module for found in settled(watched).anomalies] == ["1"]
